"""Training arguments of Hugging Face's Trainer, which fill what a library's config leaves to the script."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unipar.backend.foreign import Answer, Answers
from unipar.config import safe_yaml
from unipar.config.config_file import read_config_text
from unipar.errors import ConfigError
from unipar.utils.text import show_value

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
    "optim": "adamw_torch_fused",
}
"""Defaults of the Trainer's own arguments, where neither the file nor --args says otherwise."""

_OURS = {
    "per_device_train_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulate",
    "learning_rate": "train.optimizer.lr",
    "weight_decay": "train.optimizer.weight_decay",
    "adam_epsilon": "train.optimizer.eps",
    "max_grad_norm": "train.clip",
    "seed": "train.seed",
    "dataloader_num_workers": "data.workers",
    "logging_steps": "log.every",
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    "sgd": "sgd",
}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
_SCHEDULE_DETAILS = {
    "polynomial": ("lr_end", "power"),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}
"""Names in `lr_scheduler_kwargs` that are carried, by schedule."""

_DECAY_SHAPES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
_READ = frozenset(
    {
        *DEFAULTS,
        *_OURS,
        *("max_steps", "warmup_ratio", "bf16", "fp16", "gradient_checkpointing", "torch_compile"),
        *("dataloader_drop_last", "optim", "lr_scheduler_kwargs"),
    }
)
_CHANGES_NUMBERS = {
    "label_smoothing_factor": 0,
    "neftune_noise_alpha": None,
    "group_by_length": False,
    "optim_args": None,
    "optim_target_modules": None,
    "length_column_name": "length",
}
"""Arguments that change training and have no key of unipar, with the value that changes nothing."""

_NUMBERS = frozenset(
    {
        *("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "adam_beta1", "adam_beta2", "warmup_ratio"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
        *("warmup_steps", "seed", "dataloader_num_workers", "logging_steps"),
    }
)
_FLAGS = frozenset({"bf16", "fp16", "gradient_checkpointing", "torch_compile", "dataloader_drop_last"})


@dataclass
class TrainingArguments:
    """Arguments as given, and what was left out of them."""

    given: Mapping[str, Any]
    source: str = ""
    left_out: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])

    def answers(self) -> Answers:
        """Return keys of unipar that these arguments, or the Trainer's defaults, give."""
        found: dict[str, Answer] = {}
        for name, key in _OURS.items():
            if name in self.given or name in DEFAULTS:
                self._put(found, key, name, self._number(name))
        self._add_optimizer(found)
        self._add_length(found)
        self._add_schedule(found)
        for name, key, value in (
            ("gradient_checkpointing", "model.recompute", "blocks"),
            ("torch_compile", "model.compile", "model"),
            ("dataloader_drop_last", "data.ragged", "drop"),
        ):
            if self._flag(name):
                self._put(found, key, name, value)
        if found.get("train.clip", Answer(1, "", given=False)).value == 0:
            found["train.clip"] = Answer(None, found["train.clip"].why, given=True)
        precision = next((name for name in ("bf16", "fp16") if self._flag(name)), None)
        self._leave_out_others()
        return Answers(found, precision, f"{self.source}: {precision}" if precision else "")

    def _put(self, found: dict[str, Answer], key: str, name: str, value: Any) -> None:
        given = name in self.given
        why = f"{self.source}: {name}" if given else f"assumed: {name} is {show_value(value)} by default in the Trainer"
        found[key] = Answer(value, why, given=given)

    def _add_optimizer(self, found: dict[str, Answer]) -> None:
        word = str(self.given.get("optim", DEFAULTS["optim"]))
        name = _OPTIMIZERS.get(word)
        if name is None:
            self.wrong.append(f"{self.source}: optim: {word} is not among {', '.join(_OPTIMIZERS)}; give another one")
            name = "adamw"
        given = "optim" in self.given
        why = f"{self.source}: optim" if given else "assumed: AdamW, the default of the Trainer"
        found["train.optimizer.name"] = Answer(name, why, given=given)
        if name == "sgd":
            del found["train.optimizer.eps"]
            return
        betas = [float(self._number(f"adam_beta{i}")) for i in (1, 2)]
        self._put(found, "train.optimizer.betas", "adam_beta2" if "adam_beta2" in self.given else "adam_beta1", betas)

    def _add_length(self, found: dict[str, Answer]) -> None:
        steps = self._number("max_steps") if "max_steps" in self.given else -1
        if steps > 0:
            self._put(found, "train.steps", "max_steps", int(steps))
            return
        epochs = self._number("num_train_epochs")
        if epochs != int(epochs) or epochs < 1:
            whole = max(1, math.ceil(epochs))
            self.wrong.append(
                f"{self.source}: num_train_epochs: {epochs} is no whole number of epochs; give "
                f"num_train_epochs {whole} or max_steps"
            )
            epochs = whole
        self._put(found, "train.epochs", "num_train_epochs", int(epochs))

    def _add_schedule(self, found: dict[str, Answer]) -> None:
        word = str(self.given.get("lr_scheduler_type", DEFAULTS["lr_scheduler_type"]))
        if word not in _SCHEDULES:
            self.wrong.append(
                f"{self.source}: lr_scheduler_type: {word} is not among {', '.join(_SCHEDULES)}; give another one, "
                "and say train.schedule in the result"
            )
            return
        self._put(found, "train.schedule.name", "lr_scheduler_type", _SCHEDULES[word])
        warmup = self._number("warmup_steps")
        ratio = self._number("warmup_ratio") if self.given.get("warmup_ratio") else 0
        if (not warmup and ratio) or 0 < warmup < 1:
            ratio = ratio or warmup
            if "train.steps" not in found:
                self.wrong.append(
                    f"{self.source}: warmup_ratio: {ratio} of unknown steps; give max_steps, or warmup_steps"
                )
                return
            warmup = math.ceil(found["train.steps"].value * ratio)
        if word == "constant":
            warmup = 0
        name = "warmup_ratio" if ratio else "warmup_steps"
        self._put(found, "train.schedule.warmup", name, int(warmup))
        self._add_schedule_details(found, word)

    def _add_schedule_details(self, found: dict[str, Answer], word: str) -> None:
        """Carry `lr_scheduler_kwargs`, or the defaults of transformers for those that are not given."""
        details, known = self._schedule_kwargs(), _SCHEDULE_DETAILS.get(word, ())
        for name, value in details.items():
            if name not in known:
                self.wrong.append(
                    f"{self.source}: lr_scheduler_kwargs: {name}: {show_value(value)} has no key of unipar for "
                    f"{word}; take it out"
                )
        lr = found["train.optimizer.lr"].value

        def put(key: str, value: Any) -> None:
            self._put(found, f"train.schedule.{key}", "lr_scheduler_kwargs" if details else "lr_scheduler_type", value)

        if word == "polynomial":
            put("power", float(details.get("power", 1.0)))
            put("end", float(details.get("lr_end", 1e-7)) / lr)
        elif word == "cosine_with_min_lr":
            rate = details.get("min_lr_rate", None if (least := details.get("min_lr")) is None else float(least) / lr)
            if rate is None:
                self.wrong.append(f"{self.source}: lr_scheduler_kwargs: {word} needs min_lr or min_lr_rate; give one")
                return
            put("end", float(rate))
        elif word == "warmup_stable_decay":
            steps, shape = details.get("num_decay_steps"), str(details.get("decay_type", "cosine"))
            if steps is None or shape not in _DECAY_SHAPES:
                self.wrong.append(
                    f"{self.source}: lr_scheduler_kwargs: {word} needs num_decay_steps, and a decay_type among "
                    f"{', '.join(_DECAY_SHAPES)}; give them"
                )
                return
            put("decay", int(steps))
            put("shape", _DECAY_SHAPES[shape])
            put("end", float(details.get("min_lr_ratio", 0.0)))

    def _schedule_kwargs(self) -> dict[str, Any]:
        given: Any = self.given.get("lr_scheduler_kwargs") or {}
        if isinstance(given, str):  # as on a command line
            try:
                given = json.loads(given)
            except json.JSONDecodeError:
                given = None
        if isinstance(given, dict):
            return {str(name): value for name, value in given.items()}
        self.wrong.append(
            f"{self.source}: lr_scheduler_kwargs: {show_value(self.given['lr_scheduler_kwargs'])} is no mapping; give "
            """JSON, such as '{"power": 2}'"""
        )
        return {}

    def _number(self, name: str) -> Any:
        value = self.given.get(name, DEFAULTS.get(name))
        if isinstance(value, bool) or not isinstance(value, int | float):
            try:
                value = float(str(value))
            except ValueError:
                self.wrong.append(f"{self.source}: {name}: {show_value(value)} is not a number; give one")
                return DEFAULTS.get(name, 1)
        whole = name in ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "dataloader_num_workers")
        if whole or name == "logging_steps":
            if value != int(value) or value < (0 if name in ("seed", "dataloader_num_workers") else 1):
                self.wrong.append(f"{self.source}: {name}: {show_value(value)} is not a whole number above 0; give one")
                return DEFAULTS.get(name, 1)
            return int(value)
        return value

    def _flag(self, name: str) -> bool:
        value = self.given.get(name, False)
        if isinstance(value, str) and value.lower() in ("true", "false", "auto"):
            return value.lower() == "true"
        if value not in (True, False, None):
            self.wrong.append(f"{self.source}: {name}: {show_value(value)} is neither true nor false; give one of them")
        return value is True

    def _leave_out_others(self) -> None:
        for name, value in self.given.items():
            if name in _CHANGES_NUMBERS and value not in (None, False, {}, _CHANGES_NUMBERS[name]):
                self.wrong.append(f"{self.source}: {name}: {show_value(value)} has no key of unipar; take it out")
            elif name not in _READ:
                self.left_out.append(f"{self.source}: {name}: no setting of training in unipar")


def read_arguments(text: str | None) -> TrainingArguments:
    """Return the arguments in a JSON or YAML file, or on a command line such as `--learning_rate 1e-4`."""
    if text is None:
        return TrainingArguments({})
    words = text.strip()
    if words.startswith("--"):
        return TrainingArguments(_parse_command_line(words), "--args")
    file = Path(words)
    if file.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(
            f"--args {words}: give a .json or .yaml file of training arguments, or the arguments themselves: "
            "--args '--learning_rate 1e-4 --num_train_epochs 2'"
        )
    content = read_config_text(file)
    try:
        data: Any = json.loads(content) if file.suffix == ".json" else safe_yaml.parse_yaml(content)[0]
    except json.JSONDecodeError as e:
        raise ConfigError(f"{file}, line {e.lineno}: {e.msg}") from None
    except safe_yaml.YamlError as e:
        raise ConfigError(f"{file}, line {e.line}: {e.sentence}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}, line 1: a mapping of training arguments is wanted")
    return TrainingArguments({str(k): v for k, v in data.items()}, file.name)


def _parse_command_line(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ConfigError(f"--args: {e}; close every quotation mark") from None
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else True
        elif found.get(name) is True:
            found[name] = word
        else:
            found[name] = f"{found[name]} {word}"
    return found
