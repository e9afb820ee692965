"""First draft of a config from what was seen of a script: each guess and each gap has a comment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unipar.backend import registry
from unipar.backend.foreign import ForeignConfigReader
from unipar.config import Shard
from unipar.config.sections.optimizer import OPTIMIZERS
from unipar.config.sections.optimizer_settings import OptimizerSettings
from unipar.conversion.config_schema import SCHEMA_FILE
from unipar.conversion.import_config import nest_keys, yaml_lines
from unipar.observing.schedule_guess import guess_schedule, is_constant
from unipar.results.observed_rank import ObservedRank, guess_precision
from unipar.results.observed_recipe import Recipe, SeenOptimizer
from unipar.utils.text import count_of, join_with_or, show_value

_WITHOUT_A_KEY: Final[Mapping[str, Any]] = {"amsgrad": False, "maximize": False, "dampening": 0}
"""Settings of PyTorch's optimizers that unipar has no key for, each with the value that unipar has."""

_OWN_WAY: Final = ("weight_decay", "lr", "fused", "foreach")
"""Settings that are written by themselves, or that only say how fast an update is."""

_NOT_SPLIT: Final[Shard] = "nothing"
_SHARD_OF_WRAPPER: Final[Mapping[str, Shard]] = {"FSDP1": "parameters", "FSDP2": "parameters"}


class DraftConfig:
    """Keys of the draft, each with what is said of it."""

    def __init__(self, rank: ObservedRank, recipe: Recipe) -> None:
        self._rank, self._recipe = rank, recipe
        self._values: dict[str, Any] = {}
        self._notes: dict[str, str] = {}
        self._to_do: list[str] = []

    def _put(self, key: str, value: Any, note: str = "") -> None:
        self._values[key] = value
        if note:
            self._notes[key] = note

    def text(self, task: str, script: str) -> str:
        """Return the config as YAML, for a task that `task.use` names."""
        self._put("task.use", task)
        self._put_strategy()
        self._put_batch()
        self._put_model()
        self._put_data()
        self._put_training()
        reading = self._read_library_config()
        config = {**reading.config, **self._values}
        order = sorted(config, key=lambda key: _SECTIONS.index(key.partition(".")[0]))
        tree = nest_keys({key: config[key] for key in order})
        notes = {key: f"guess: {why}" if why.startswith("assumed") else why for key, why in reading.notes.items()}
        to_do = [*self._to_do, *reading.wrong]
        lines = [
            f"# yaml-language-server: $schema={SCHEMA_FILE}",
            f"# First draft for {script}, made by `unipar observe --to task` from what was seen of a run.",
            "# A value without a remark was seen. `guess:` marks what may be wrong, `to do:` what was not seen.",
            *([""] if to_do else []),
            *(f"# to do: {sentence}" for sentence in to_do),
            *(f"# left out: {note}" for note in reading.left_out),
            "",
            *yaml_lines(tree, {**notes, **self._notes}),
        ]
        return "\n".join([*lines, ""])

    def _read_library_config(self) -> ForeignConfigReader:
        """Return what the library's own config says; what was seen counts more."""
        reading = ForeignConfigReader("the library's config", Path(), {}, self._values)
        if self._recipe.library_config:
            registry.find_backend(self._recipe.backend).read_foreign(reading, self._recipe.library_config)
        for key in [key for key in reading.config if key in self._values or _is_above(key, self._values)]:
            del reading.config[key]
        for key in ("train.clip", "train.schedule.name"):
            if key in reading.config:
                self._values.pop(key, None)
        return reading

    # Sections

    def _put_strategy(self) -> None:
        recipe, rank = self._recipe, self._rank
        shards = [*(_SHARD_OF_WRAPPER[name] for name in recipe.wrappers if name in _SHARD_OF_WRAPPER), _NOT_SPLIT]
        shard = shards[0]
        split_states = any(o.name == "ZeroRedundancyOptimizer" for o in recipe.optimizers)
        if split_states:
            shard = "optimizer"
        backend = recipe.backend if shard in self._shards_of(recipe.backend) else ""
        if backend:
            self._put("backend", backend)
        else:
            self._put("backend", "native", f"the script has {', '.join(recipe.wrappers) or 'no wrapper'}")
        self._put("device", rank.device)
        why = ""
        if rank.size < rank.launched_size:
            why = f"to do: as many as you meant; of {rank.launched_size} processes each trained alone"
        if recipe.mesh:
            sizes = " x ".join(map(str, recipe.mesh))
            why = f"to do: the script splits weights on a mesh of {sizes}: write parallel.tensor or shard_over, too"
        self._put("parallel.data", rank.size, why)
        if not recipe.library_config:
            unsure = "FSDP1" in recipe.wrappers or split_states
            self._put("parallel.shard", shard, "guess: from the wrapper" if unsure else "")

    def _shards_of(self, backend: str) -> tuple[Shard, ...]:
        return registry.find_backend(backend).capabilities.shards if backend else ()

    def _put_batch(self) -> None:
        rank, loader = self._rank, self._recipe.loader
        micro = rank.first_dimension
        if micro is None:
            self._put("batch.micro", 1, "to do: samples in one forward pass on a rank; no loader of torch was seen")
        elif loader is not None and loader.batch_size == micro:
            self._put("batch.micro", micro)
        else:
            self._put("batch.micro", micro, "guess: first dimension of the first tensor in a batch")
        counts = Counter(rank.backwards)
        accumulate = counts.most_common(1)[0][0] if counts else 1
        why = ""
        if len(counts) > 1:
            why = f"guess: backwards in a step; the first steps had {', '.join(map(str, sorted(counts)))}"
        elif accumulate > 1:
            why = "guess: backwards in a step; 1 if they are different losses of the same batch"
        self._put("batch.accumulate", max(1, accumulate), why)

    def _put_model(self) -> None:
        recipe = self._recipe
        if recipe.recompute:
            self._put("model.recompute", "blocks", "guess: modules that compute activations again")
        if recipe.compiled:
            self._put("model.compile", recipe.compiled)
        if recipe.sync_batchnorm:
            self._put("model.sync_batchnorm", value=True)
        if recipe.frozen:
            self._to_do.append(
                f"{recipe.frozen:,} parameters of the script's model are frozen: set requires_grad_(False) in model()"
            )

    def _put_data(self) -> None:
        loader = self._recipe.loader
        if loader is None:
            return
        why = "" if loader.shuffle is not None else "to do: the script has a sampler of its own"
        self._put("data.shuffle", loader.shuffle is not False, why)
        if loader.workers:
            self._put("data.workers", loader.workers)
        if loader.drop_last:
            self._put("data.last_batch", "drop")

    def _put_training(self) -> None:
        recipe, rank = self._recipe, self._rank
        self._put("train.steps", max(1, rank.steps), "guess: steps that were taken")
        self._put_optimizer()
        self._put_schedule()
        if rank.clip is not None and rank.clip < _NO_LIMIT:
            other = f"to do: the script limits the norm of kind {recipe.norm_type:g}; unipar's is 2"
            self._put("train.clip", rank.clip, "" if recipe.norm_type == 2.0 else other)
        elif rank.clip is None and rank.norms and not recipe.library_config:
            self._to_do.append("train.clip: the script clips, and its limit is not a number: write it")
        self._put_precision()
        drawn = "guess: the script gave PyTorch no seed before the model was made"
        self._put("train.seed", recipe.seed or 0, drawn if recipe.seed is None else "")

    def _put_optimizer(self) -> None:
        recipe = self._recipe
        if not recipe.optimizers:
            return
        seen = main_optimizer(recipe)
        if len(recipe.optimizers) > 1:
            names = ", ".join(o.name for o in recipe.optimizers)
            self._to_do.append(
                f"the script has {len(recipe.optimizers)} optimizers ({names}); this is {seen.name}: return the parts "
                "from model() as a dict, write train(run) in the task, and train.parts.NAME.optimizer here"
            )
        name = optimizer_name(seen)
        section = "train.optimizer"
        if name is None and recipe.library_config.get("optimizer"):
            return  # the library's config says it
        if name is None:
            known = join_with_or([*OPTIMIZERS])
            self._put(f"{section}.name", "adamw", f"guess: {seen.name} is not among {known}: the task makes it")
        else:
            self._put(f"{section}.name", name)
        settings = dict(seen.settings)
        decays = [d for g in ({}, *seen.groups) if (d := {**settings, **g}.get("weight_decay"))]
        if isinstance(rate := settings.get("lr"), int | float):
            self._put(f"{section}.lr", rate)
        self._put(f"{section}.weight_decay", float(max(decays, default=0.0)))
        if seen.decay == "own":
            self._notes[f"{section}.weight_decay"] = "to do: groups differ: the task's groups() must give each its own"
        elif seen.decay != "all":
            self._put(f"{section}.decay", seen.decay)
        if any(len(group.keys() - {"weight_decay"}) for group in seen.groups):
            self._to_do.append("the optimizer's groups have rates or settings of their own: write groups() in the task")
        if name is not None:
            self._put_own_settings(OPTIMIZERS[name], settings)

    def _put_own_settings(self, kind: type[OptimizerSettings], settings: Mapping[str, Any]) -> None:
        for key, field in kind.model_fields.items():
            if key in _OWN_WAY or settings.get(key) is None:
                continue
            value = settings[key]
            usual = list(field.default) if isinstance(field.default, tuple) else field.default
            if value != usual:
                self._put(f"train.optimizer.{key}", value)
        for key, usual in _WITHOUT_A_KEY.items():
            if settings.get(key, usual) != usual:
                self._to_do.append(f"the script's optimizer has {key}={show_value(settings[key])}, which unipar lacks")

    def _put_schedule(self) -> None:
        recipe, rank = self._recipe, self._rank
        rates = {step: groups[0] for step, groups in rank.rates.items() if groups}
        base = main_optimizer(recipe).settings.get("lr") if recipe.optimizers else None
        if not rates or not isinstance(base, int | float):
            return
        guess = guess_schedule(rates, float(base), recipe.schedules, rank.steps)
        named = ", ".join(f"{s.name}({_numbers(s.numbers)})" for s in recipe.schedules)
        of_script = f"; the script's is {named}" if named else "; the script sets them itself"
        if guess is None:
            why = f"to do: no schedule was found that gives the rates{of_script}: write it, or the task's schedule()"
            self._put("train.schedule.name", "constant", why)
            return
        self._put("train.optimizer.lr", guess.rate)
        for key, value in guess.settings.items():
            self._put(f"train.schedule.{key}", value)
        warmup = int(guess.settings.get("warmup", 0))
        seen = f"it gives the {count_of(len(rates), 'rate')} that were seen"
        if is_constant(guess):
            if recipe.schedules:
                self._notes["train.schedule.name"] = f"to do: the rate did not change in {rank.steps} steps{of_script}"
            return
        if warmup and max(rates) <= warmup and not guess.hinted:
            seen = f"to do: only the warm-up was seen: say what comes after it{of_script}"
            self._notes["train.schedule.name"] = seen
        elif guess.others and not guess.hinted:
            self._notes["train.schedule.name"] = f"guess: {seen}; so do {', '.join(guess.others)}"
        else:
            self._notes["train.schedule.name"] = f"guess: {seen}"
        if guess.steps != rank.steps:
            self._put("train.steps", guess.steps, f"guess: of the schedule; {rank.steps} were taken")

    def _put_precision(self) -> None:
        precision, why = guess_precision(self._rank, self._recipe)
        if not (self._recipe.library_config and precision == "fp32"):
            self._put("train.precision", precision, why)


_NO_LIMIT: Final = 1e6
"""Limit of a clip from which it only measures the norm."""

_SECTIONS: Final = ("task", "backend", "device", "parallel", "batch", "model", "data", "train", "options")


def _is_above(key: str, values: Mapping[str, Any]) -> bool:
    return any(other.startswith(f"{key}.") for other in values)


def _numbers(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{key}={value:g}" for key, value in numbers.items() if not key.endswith("_lr"))


def main_optimizer(recipe: Recipe) -> SeenOptimizer:
    """Return the optimizer that the draft is about: the first that unipar has, or else the first."""
    return next((o for o in recipe.optimizers if optimizer_name(o) is not None), recipe.optimizers[0])


def optimizer_name(seen: SeenOptimizer) -> str | None:
    """Return unipar's name of an optimizer, or None if unipar has none like it."""
    for name, kind in OPTIMIZERS.items():
        module, _, cls = kind.implementation.partition(":")
        if cls == seen.name and (seen.module == module or seen.module.startswith(f"{module}.")):
            return "adamw" if name == "adam" and seen.settings.get("decoupled_weight_decay") else name
    return None
