"""Training arguments of Hugging Face's Trainer, which fill what a library's config leaves to the script."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unipar.backend.foreign import AUTO, Answer, Answers
from unipar.conversion.argument_names import (
    AXOLOTL_NAMES,
    EIGHT_BIT_OPTIMIZERS,
    KEY_OF_ARGUMENT,
    KEY_TO_SAY,
    LOADER_DEFAULTS,
    MUON_DETAILS,
    NEVER_TOLD,
    NOT_OF_TRAINING,
    OPTIMIZER_OF_WORD,
    OTHER_DEFAULTS,
    OWN_FORMULAS,
    READ_ARGUMENTS,
    RMSPROP_DETAILS,
    ROUNDED_OPTIMIZERS,
    SCHEDULE_DETAILS,
    SCHEDULE_OF_WORD,
    SHAPE_OF_WORD,
    TRAINER_DEFAULTS,
    UNKNOWN_CHANGES,
)
from unipar.utils.text import show_value


@dataclass(frozen=True)
class RefusedArgument:
    """Argument that cannot be carried: its name as given, the reason, the way out, and unipar's key in its place."""

    name: str
    why: str
    way: str
    ours: str | None = None


@dataclass
class TrainingArguments:
    """Arguments as given, and what was left out of them."""

    given: Mapping[str, Any]
    """By the Trainer's names."""

    source: str = ""
    """Where they stand, as messages name it; "": in the imported file itself."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names as given, of those that are not the Trainer's."""

    defaults: Mapping[str, Any] = field(default_factory=lambda: TRAINER_DEFAULTS)
    elsewhere: frozenset[str] = frozenset()
    """Arguments that somebody else reads."""

    left_out: list[str] = field(default_factory=list[str])
    assumed: list[RefusedArgument] = field(default_factory=list[RefusedArgument])
    """Arguments that are carried though they mean something else; `--strict` refuses them."""

    refused: list[RefusedArgument] = field(default_factory=list[RefusedArgument])
    usual: set[str] = field(default_factory=set[str])
    """Arguments that have the Trainer's default and are not told."""

    eight_bits: str = ""
    """Optimizer with states of 8 bits that is asked for; "": none. The strategy decides whether it is unipar's."""

    def place(self, name: str) -> str:
        """Return an argument as messages name it."""
        name = self.names.get(name, name)
        return f"{self.source}: {name}" if self.source else name

    def sentence(self, refusal: RefusedArgument) -> str:
        """Return the sentence on an argument that stands beside the imported file."""
        return f"{self.place(refusal.name)}: {refusal.why}; {refusal.way}"

    def _refuse(self, name: str, why: str, way: str, ours: str | None = None) -> None:
        self.refused.append(RefusedArgument(self.names.get(name, name), why, way, ours))

    def _assume(self, name: str, why: str, way: str, ours: str) -> None:
        self.assumed.append(RefusedArgument(self.names.get(name, name), why, way, ours))

    def answers(self) -> Answers:
        """Return keys of unipar that these arguments, or the Trainer's defaults, give."""
        answers: dict[str, Answer] = {}
        for name, key in KEY_OF_ARGUMENT.items():
            if name in TRAINER_DEFAULTS or not has_default(name, self.given.get(name)):
                self._put(answers, key, name, self._number(name))
        if (micros := answers["batch.accumulate"]).from_user and micros.value > 1:
            answers["batch.accumulate"] = replace(micros, why=f"{micros.why}; {_ADDED_UP}")
        self._add_optimizer(answers)
        self._add_length(answers)
        self._add_schedule(answers)
        self._add_times(answers)
        for name, key, value in (
            ("gradient_checkpointing", "model.recompute", "blocks"),
            ("activation_checkpointing", "model.recompute", "blocks"),
            ("torch_compile", "model.compile", "model"),
            ("dataloader_drop_last", "data.last_batch", "drop"),
            ("no_cuda", "device", "cpu"),
            ("use_cpu", "device", "cpu"),
        ):
            if self._flag(name):
                self._put(answers, key, name, value)
        if answers.get("train.clip", Answer(1, "", from_user=False)).value == 0:
            answers["train.clip"] = Answer(None, answers["train.clip"].why, from_user=True)
        if (order := self.given.get("train_sampling_strategy")) == "sequential":
            self._put(answers, "data.shuffle", "train_sampling_strategy", value=False)
        elif self._flag("group_by_length") or not has_default("train_sampling_strategy", order):
            name = "group_by_length" if self._flag("group_by_length") else "train_sampling_strategy"
            why = "samples come in a random order, not beside others of their length"
            self._assume(name, why, "take it out", "data.shuffle")
        precision = self._precision()
        self._leave_out_others(evaluates="eval.every" in answers)
        return Answers(answers, precision, self.place(precision) if precision else "")

    def _precision(self) -> str | None:
        pure = "pure_bf16" if self._flag("pure_bf16") else "bf16" if self.given.get("bf16") == "full" else None
        if pure is not None:
            why = f"{show_value(self.given[pure])}: unipar keeps fp32 weights beside those in bf16"
            self._assume(pure, why, "give bf16 true", "train.precision")
            return "bf16"
        for name in ("bf16", "fp16"):
            automatic = self.given.get(name) == AUTO and self.given.get("fp16") is not True
            if automatic and name == "bf16":
                why = "'auto': bf16, as on a GPU that computes in it"
                self._assume(name, why, "give true or false", "train.precision")
                return name
            if self._flag(name):
                return name
        return None

    def _put(self, answers: dict[str, Answer], key: str, name: str, value: Any) -> None:
        from_user = self.given.get(name) is not None
        who = "the Trainer" if self.defaults is TRAINER_DEFAULTS else "axolotl"
        why = self.place(name) if from_user else f"assumed: {name} is {show_value(value)} by default in {who}"
        answers[key] = Answer(value, why, from_user=from_user, usual=self._is_usual(name, value))

    def _is_usual(self, name: str, value: Any) -> bool:
        return bool(self.given) and has_default(name, value)

    def _add_optimizer(self, answers: dict[str, Answer]) -> None:
        if self._add_muon(answers):
            return
        word = str(self.given.get("optim") or TRAINER_DEFAULTS["optim"]).removeprefix("OptimizerNames.").lower()
        name = OPTIMIZER_OF_WORD.get(word)
        if word in ROUNDED_OPTIMIZERS:
            name, why = "adamw", f"{word}: AdamW with states in fp32, not in fewer bits"
            self._assume("optim", why, "give adamw_torch", "train.optimizer.name")
        if word in EIGHT_BIT_OPTIMIZERS:
            name, self.eight_bits = "adamw", word
        if name is None:
            why = f"{word} is neither sgd nor rmsprop nor a kind of adamw, such as adamw_torch and adamw_bnb_8bit"
            self._refuse("optim", OWN_FORMULAS.get(word, why), "give another one", "train.optimizer")
            name = "adamw"
        from_user = "optim" in self.given
        why = self.place("optim") if from_user else "assumed: AdamW, the default of the Trainer"
        usual = bool(self.given) and OPTIMIZER_OF_WORD.get(word) == "adamw"
        answers["train.optimizer.name"] = Answer(name, why, from_user=from_user, usual=usual)
        details = self._optim_args(word)
        if name in ("sgd", "rmsprop"):
            del answers["train.optimizer.eps"]  # adam_epsilon is Adam's
            for key, value in details.items():
                answers[f"train.optimizer.{key}"] = Answer(value, self.place("optim_args"), from_user=True)
            return
        betas = [float(self._number(f"adam_beta{i}")) for i in (1, 2)]
        places = [self.place(name) for name in ("adam_beta1", "adam_beta2") if self.given.get(name) is not None]
        why = (
            " and ".join(places)
            or f"assumed: adam_beta1 and adam_beta2 are {show_value(betas)} by default in the Trainer"
        )
        usual = all(self._is_usual(f"adam_beta{i}", beta) for i, beta in enumerate(betas, 1))
        answers["train.optimizer.betas"] = Answer(betas, why, from_user=bool(places), usual=usual)

    def _add_muon(self, answers: dict[str, Answer]) -> bool:
        """Carry LLaMA-Factory's Muon, if it is asked for: with the Trainer's rate and decay, or with its own."""
        details: Any = self.given.get("optim_config") or {}
        if details and not (isinstance(details, dict) and details.get("name") == "muon"):
            self._refuse("optim_config", f"{show_value(details)} has no key of unipar", "take it out")
            details = {}
        if not details and not self._flag("use_muon"):
            return False
        name = "optim_config" if details else "use_muon"
        eps = answers.pop("train.optimizer.eps").value
        values: dict[str, Any] = {"name": "muon", "ns_precision": "bf16"}
        if details:
            values |= {ours: details.get(theirs, default) for theirs, (ours, default) in MUON_DETAILS.items()}
            for unknown in sorted(details.keys() - MUON_DETAILS.keys() - {"name"}):
                why = f"{unknown}: {show_value(details[unknown])} has no key of unipar for muon"
                self._refuse("optim_config", why, "take it out", "train.optimizer")
            if "learning_rate" in self.given and "lr" not in details:
                rate = f"the rate of Muon is that in optim_config, {MUON_DETAILS['lr'][1]:g} by default"
                self.left_out.append(f"{self.place('learning_rate')}: {rate}")
        else:
            values |= {"adamw.betas": [float(self._number(f"adam_beta{i}")) for i in (1, 2)], "adamw.eps": eps}
        for key, value in values.items():
            answers[f"train.optimizer.{key}"] = Answer(value, self.place(name), from_user=True)
        why = "auto: all but those of embeddings and of the last module, not all without embed or lm_head in their name"
        self._assume(name, why, "take it out", "train.optimizer.matrices")
        return True

    def _optim_args(self, word: str) -> dict[str, Any]:
        """Return RMSprop's own settings, such as `alpha=0.9,centered=true`; other optimizers' are refused."""
        text = str(self.given.get("optim_args") or "").replace(" ", "")
        pairs = [pair.partition("=") for pair in text.split(",") if pair]
        details: dict[str, Any] = {}
        for key, _, value in pairs:
            try:
                known = word == "rmsprop" and key in (*RMSPROP_DETAILS, "centered")
                details[key] = value.lower() in ("true", "1", "yes") if key == "centered" else float(value)
            except ValueError:
                known = False
            if not known:
                self._refuse("optim_args", f"{key}={value} is not carried for {word}", "take it out")
                return {}
        if details.pop("weight_decay", None) is not None:
            why = "weight_decay has no effect, as the Trainer gives each group its own argument of that name"
            self.left_out.append(f"{self.place('optim_args')}: {why}")
        return details

    def _add_length(self, answers: dict[str, Answer]) -> None:
        steps = -1 if self.given.get("max_steps") is None else self._number("max_steps")
        if steps > 0:
            self._put(answers, "train.steps", "max_steps", int(steps))
            return
        epochs = self._number("num_train_epochs")
        if epochs != int(epochs) or epochs < 1:
            rounded_up = max(1, math.ceil(epochs))
            why, way = f"{epochs} is no whole number of epochs", f"give num_train_epochs {rounded_up} or max_steps"
            self._refuse("num_train_epochs", why, way, "train.epochs")
            epochs = rounded_up
        self._put(answers, "train.epochs", "num_train_epochs", int(epochs))

    def _add_schedule(self, answers: dict[str, Answer]) -> None:
        word = str(self.given.get("lr_scheduler_type") or self.defaults["lr_scheduler_type"])
        word = word.removeprefix("SchedulerType.").lower()
        if word not in SCHEDULE_OF_WORD:
            why = f"{word} is not among {', '.join(SCHEDULE_OF_WORD)}"
            way = "give another one, and say train.schedule in the result"
            self._refuse("lr_scheduler_type", why, way, "train.schedule")
            return
        self._put(answers, "train.schedule.name", "lr_scheduler_type", SCHEDULE_OF_WORD[word])
        warmup: Any = self._number("warmup_steps")
        ratio = 0 if warmup >= 1 else warmup or (self._number("warmup_ratio") if self.given.get("warmup_ratio") else 0)
        if ratio >= 1:
            self._refuse("warmup_ratio", f"{ratio} is not below 1", "give warmup_steps", "train.schedule.warmup")
            ratio = 0
        if ratio:
            warmup = math.ceil(answers["train.steps"].value * ratio) if "train.steps" in answers else float(ratio)
        if word == "constant":
            warmup, ratio = 0, 0
        name = "warmup_ratio" if ratio and self.given.get("warmup_ratio") else "warmup_steps"
        self._put(answers, "train.schedule.warmup", name, warmup if ratio else int(warmup))
        self._add_schedule_details(answers, word)

    def _add_schedule_details(self, answers: dict[str, Answer], word: str) -> None:
        """Carry `lr_scheduler_kwargs`, or the defaults of transformers for those that are not given."""
        details, known = self._schedule_kwargs(), SCHEDULE_DETAILS.get(word, ())
        for name, value in details.items():
            if name not in known:
                why = f"{name}: {show_value(value)} has no key of unipar for {word}"
                self._refuse("lr_scheduler_kwargs", why, "take it out", "train.schedule")
        lr = answers["train.optimizer.lr"].value

        def put(key: str, value: Any) -> None:
            self._put(
                answers, f"train.schedule.{key}", "lr_scheduler_kwargs" if details else "lr_scheduler_type", value
            )

        if word == "polynomial":
            put("power", float(details.get("power", 1.0)))
            put("min_lr_ratio", float(details.get("lr_end", 1e-7)) / lr)
        elif word == "cosine_with_min_lr":
            rate = details.get("min_lr_rate", None if (least := details.get("min_lr")) is None else float(least) / lr)
            if rate is None:
                why = f"{word} needs min_lr or min_lr_rate"
                self._refuse("lr_scheduler_kwargs", why, "give one", "train.schedule")
                return
            put("min_lr_ratio", float(rate))
        elif word == "warmup_stable_decay":
            steps, shape = details.get("num_decay_steps"), str(details.get("decay_type", "cosine"))
            if steps is None or shape not in SHAPE_OF_WORD:
                why = f"{word} needs num_decay_steps, and a decay_type among {', '.join(SHAPE_OF_WORD)}"
                self._refuse("lr_scheduler_kwargs", why, "give them", "train.schedule")
                return
            put("decay", int(steps))
            put("shape", SHAPE_OF_WORD[shape])
            put("min_lr_ratio", float(details.get("min_lr_ratio", 0.0)))
        elif word == "cosine_with_restarts" and details.get("num_cycles", 1) != 1:
            why = f"num_cycles: {details['num_cycles']}: a schedule of unipar does not begin again"
            self._refuse("lr_scheduler_kwargs", why, "take it out", "train.schedule")
        elif word == "inverse_sqrt" and "timescale" in details:
            put("scale", int(details["timescale"]))
        elif word == "cosine" and (least := self.given.get("cosine_min_lr_ratio")) is not None:
            self._put(answers, "train.schedule.min_lr_ratio", "cosine_min_lr_ratio", float(least))

    def _add_times(self, answers: dict[str, Answer]) -> None:
        """Carry after how many steps the Trainer logs, evaluates and saves; an argument about that must be given."""
        for what, key in (("logging", "log.every"), ("eval", "eval.every"), ("save", "checkpoint.every")):
            old = "evaluation_strategy" if what == "eval" else ""
            how = old if self.given.get(old) is not None else f"{what}_strategy"
            every = f"{what}_steps"
            named = [name for name in (how, every) if self.given.get(name) is not None]
            if not named:
                continue
            usual = "steps" if self.defaults is not TRAINER_DEFAULTS else OTHER_DEFAULTS[f"{what}_strategy"]
            wanted: Any = self.given.get(how)
            strategy = "no" if wanted is False else str(wanted or usual)  # YAML's no is false
            if strategy == "no" and every in named and what != "save":
                self.left_out.append(f"{self.place(every)}: it has no effect, as {how} is no")
            if strategy not in ("no", "steps"):
                self.left_out.append(f"{self.place(how)}: {strategy}: say {key} in steps")
            if strategy == "steps" and (steps := self._steps_of(answers, every, key)) is not None:
                self._put(answers, key, every if every in named else how, steps)
            if what == "save" and strategy != "no":
                self._add_kept(answers)

    def _add_kept(self, answers: dict[str, Answer]) -> None:
        if self.given.get("save_total_limit") is not None and (most := int(self._number("save_total_limit"))) > 0:
            self._put(answers, "checkpoint.keep", "save_total_limit", most)
        elif (saves := answers.get("checkpoint.every")) is not None:
            why = f"{saves.why}; the newest 3 are kept (checkpoint.keep), where the Trainer keeps all"
            answers["checkpoint.every"] = replace(saves, why=why, usual=False)

    def _steps_of(self, answers: Mapping[str, Answer], name: str, key: str) -> int | None:
        """Return a number of steps, which may be given as a share of all; None if that is told instead."""
        if self.given.get(name) is None and name == "eval_steps":
            return self._steps_of(answers, "logging_steps", key)
        value, steps = self._number(name), answers.get("train.steps")
        if 0 < value < 1 and steps is None:
            self.left_out.append(f"{self.place(name)}: a share of the steps; say {key}")
            return None
        if 0 < value < 1 and steps is not None:
            value = math.ceil(value * steps.value)
        if value < 1 or value != int(value):
            self._refuse(name, f"{show_value(value)} is not a whole number above 0", "give one", key)
            return None
        if key == "eval.every" and steps is not None and value > steps.value:
            self.left_out.append(f"{self.place(name)}: {int(value)} is more than the {steps.value} steps of the run")
            return None
        return int(value)

    def _schedule_kwargs(self) -> dict[str, Any]:
        kwargs: Any = self.given.get("lr_scheduler_kwargs") or {}
        if isinstance(kwargs, str):  # as on a command line
            try:
                kwargs = json.loads(kwargs)
            except json.JSONDecodeError:
                kwargs = None
        if isinstance(kwargs, dict):
            return {str(name): value for name, value in kwargs.items()}
        why = f"{show_value(self.given['lr_scheduler_kwargs'])} is no mapping"
        self._refuse("lr_scheduler_kwargs", why, """give JSON, such as '{"power": 2}'""", "train.schedule")
        return {}

    def _number(self, name: str) -> Any:
        default, ours = {**OTHER_DEFAULTS, **self.defaults}.get(name, 1), KEY_OF_ARGUMENT.get(name)
        value = self.given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            try:
                value = float(str(value))
            except ValueError:
                self._refuse(name, f"{show_value(value)} is not a number", "give one", ours)
                return default
        count = name in ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "dataloader_num_workers")
        if count:
            if value != int(value) or value < (0 if name in ("seed", "dataloader_num_workers") else 1):
                self._refuse(name, f"{show_value(value)} is not a whole number above 0", "give one", ours)
                return default
            return int(value)
        return value

    def _flag(self, name: str) -> bool:
        value = self.given.get(name, False)
        if isinstance(value, str) and value.lower() in ("true", "false", "auto"):
            return value.lower() == "true"
        if name == "gradient_checkpointing" and isinstance(value, str):
            return True  # axolotl's "offload" and "unsloth" say where the activations stay
        if value not in (True, False, None):
            self._refuse(name, f"{show_value(value)} is neither true nor false", "give one of them")
        return value is True

    def _leave_out_others(self, *, evaluates: bool) -> None:
        untold = {*NEVER_TOLD, *(["do_eval"] if evaluates else [])}
        for name, value in self.given.items():
            if name in self.elsewhere:
                continue
            unknown = name not in KNOWN_ARGUMENTS and _why_left_out(name) == _NO_SETTING
            if unknown and (meant := _misspelt(name)) is not None:
                self._refuse(name, f"there is no such argument (did you mean {meant!r}?)", "correct it, or take it out")
            elif has_default(name, value) or name in untold or name.startswith("_"):
                self.usual.add(name)
            elif name == "accelerator_config":
                self._read_loader_settings(value)
            elif name in UNKNOWN_CHANGES:
                self._refuse(name, f"{show_value(value)} has no key of unipar", "take it out")
            elif name not in READ_ARGUMENTS:
                self.left_out.append(f"{self.place(name)}: {_why_left_out(name)}")

    def _read_loader_settings(self, settings: Any) -> None:
        """Refuse what would change a batch; leave out other settings of `accelerator_config`."""
        inside: dict[str, Any] = settings if isinstance(settings, dict) else {}
        if not inside or inside.get("gradient_accumulation_kwargs"):
            self.left_out.append(f"{self.place('accelerator_config')}: {_NO_SETTING}")
        if inside.get("split_batches") is True:
            why = "split_batches: per_device_train_batch_size is that of all ranks together"
            self._refuse("accelerator_config", why, "take it out, and divide it", "batch.micro")
        for name, value in inside.items():
            self.usual.add(f"accelerator_config.{name}")
            read = name in ("split_batches", "gradient_accumulation_kwargs")
            if not read and value not in (None, LOADER_DEFAULTS.get(name, False)):
                self.left_out.append(f"{self.place('accelerator_config')}.{name}: {_NO_SETTING}")


KNOWN_ARGUMENTS = frozenset({*READ_ARGUMENTS, *OTHER_DEFAULTS, *UNKNOWN_CHANGES, *NEVER_TOLD})
"""Arguments of the Trainer, and those that unipar reads."""


_DEFAULTS: Mapping[str, Any] = {**OTHER_DEFAULTS, **UNKNOWN_CHANGES, **TRAINER_DEFAULTS}


def has_default(name: str, value: Any) -> bool:
    """Return whether a value, however it is written, is the Trainer's default of an argument, or leaves it open."""
    if value is None or value in ([], {}, ""):
        return True
    default = False if (known := _DEFAULTS.get(name)) is None else known
    if isinstance(value, str) and isinstance(default, int | float):
        try:
            return float(value) == default and not isinstance(default, bool)
        except ValueError:
            return value.lower() == str(default).lower()
    return bool(value == default)


def _why_left_out(name: str) -> str:
    if name in KEY_TO_SAY:
        return f"say {KEY_TO_SAY[name]}"
    for why, words in NOT_OF_TRAINING.items():
        if name in words or name.startswith(tuple(word for word in words if word.endswith("_"))):
            return why
    return _NO_SETTING


_ADDED_UP = "a mean, where the Trainer adds up the losses of some models, as those of T5 and of BERT's classifiers"
_NO_SETTING = "no setting of training in unipar"
_MISSPELT = 0.85
"""Likeness of two names from which one counts as the other misspelt."""


def _misspelt(name: str) -> str | None:
    """Return the argument that is probably meant by a name that is none; None if it is like none of them."""
    known = sorted({*READ_ARGUMENTS, *AXOLOTL_NAMES, *UNKNOWN_CHANGES} - {name})
    return next(iter(difflib.get_close_matches(name, known, 1, _MISSPELT)), None)
