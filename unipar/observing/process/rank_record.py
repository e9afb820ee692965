"""`RankRecord`: what one observed process has done, written into the folder of the results as it goes."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter, deque
from collections.abc import Mapping
from itertools import chain
from statistics import median
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unipar.distributed.device import generator_state
from unipar.observing.libraries import name_callers
from unipar.observing.process import script_checks as checks
from unipar.observing.process.batch_record import BatchRecord
from unipar.observing.process.script_frames import find_variable
from unipar.observing.process.script_recipe import ScriptRecipe
from unipar.observing.process.script_state import ScriptState, layers_of, parameters_of, whole_size, wrapper_of
from unipar.observing.process.step_phases import Phase
from unipar.observing.settings import ObserveSettings
from unipar.profiling.work import RankWork
from unipar.results.observed_rank import LAST_STEP, LocalFault, ObservedRank, ObservedState, observed_rank_path
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.watch.digests import digest_tensor
from unipar.utils.files import write_file_atomically
from unipar.utils.procfs import anonymous_memory
from unipar.utils.text import short_dtype

FIRST_STEPS: Final = 10
"""Number of first steps that have a line each in the run log, and whose losses, norms and rates are kept."""

KEPT_TIMES: Final = 1000
"""Number of the latest steps whose times are kept, for their medians."""


@final
class RankRecord:
    """Record of one process; nothing is written before the script's first update, when the rank is known."""

    def __init__(self, settings: ObserveSettings, state: ScriptState) -> None:
        for record in (ObservedState, ObservedRank):
            record.model_rebuild()
        self._settings, self._state = settings, state
        self.schedule_steps: Counter[int] = Counter()
        """Steps of each learning rate schedule in the present step of the optimizer."""

        self.batches = BatchRecord()
        self._repeats = False
        """Whether the batches of the present epoch are those of the one before."""

        self.recipe = ScriptRecipe(state)
        self._place: dict[str, Any] = {}
        self._script: dict[str, Any] = {}
        """Recipe of the script's training: optimizer, batch, clip."""

        self._work: RankWork | None = None
        self._log: RunLog | None = None
        self._logged_now = True
        """Whether the present step has a line in the run log: then its numbers are read from the device."""

        self._notes_update = True
        """Whether what optimizers are given is noted in the present step."""

        self._begun: int | None = None
        self._faults: dict[str, LocalFault] = {}
        self._notes: dict[str, None] = {}
        self._initial: dict[str, int] = {}
        self._states: dict[int, ObservedState] = {}
        self.forget_steps()

    def forget_steps(self) -> None:
        """Count steps anew: those until now were parts of one."""
        self._losses: list[float] = []
        self._backward_losses: list[Tensor] = []
        self._unscaled: tuple[int, Any] = (0, None)
        self._loss: float | None = None
        self._backwards: list[int] = []
        self._norms: dict[int, float] = {}
        self._norms_after: dict[int, float] = {}
        self._clip: float | None = None
        self._split = False
        self._rates: dict[int, tuple[float, ...]] = {}
        self._random: dict[int, int] = {}
        self._times: deque[float] = deque(maxlen=KEPT_TIMES)
        self._phases: deque[Mapping[Phase, float]] = deque(maxlen=KEPT_TIMES)
        self._waited = self._clocked = 0.0
        self._steps = self._skipped = self._logged = 0
        self._seconds = 0.0
        self.schedule_steps.clear()
        self._faults.clear()
        self._states.clear()
        self._before: dict[str, int] = {}
        self._gradients: dict[str, int] = {}
        self._gradient_norms: dict[int, float] = {}
        self._given_rates: dict[int, float] = {}

    @property
    def opened(self) -> bool:
        """Whether rank and size are known, so that something can be written."""
        return self._log is not None

    @property
    def device(self) -> torch.device:
        """Device of the models' parameters."""
        return _device_of(self._state)

    def add_work(self, work: RankWork) -> None:
        """Note the operations of a step, or why they were not counted."""
        self._work = work
        for text in work.notes:
            self.note(text)

    def note(self, text: str) -> None:
        """Add a sentence on what could not be observed."""
        self._notes[text] = None

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""
        self._logged_now = step <= FIRST_STEPS or step % self._settings.log_every == 0
        self._notes_update = self._logged_now or step in self._settings.checks

    def open(self, rank: int, size: int, launched_size: int, host: str) -> None:
        """Begin to write, as this rank; processes without a group take the next number that is free."""
        if self._log is not None:
            return
        folder = self._settings.folder
        folder.mkdir(parents=True, exist_ok=True)  # another machine may not share it
        while size == 1 and not _claim(folder, rank):
            rank += 1
        self._place = {"rank": rank, "size": size, "launched_size": launched_size, "host": host, "pid": os.getpid()}
        self._log = RunLog(run_log_path(folder, rank))

    def describe(self, *, updated: bool = False) -> None:
        """Note what the script trains, with what, and who calls the optimizer; `updated`: weights have changed."""
        self.recipe.describe()
        if not updated:
            self._initial = checks.digest_weights(self._state) | self._initial
        named = dict(self._state.named_parameters())
        trained = [p for o in self._state.optimizers for p in parameters_of(o)]
        wrappers = self._state.wrappers
        models = [_describe_model(model, wrappers) for model in self._state.models]
        dtypes: dict[str, int] = {}
        for p in named.values():
            if p.requires_grad:
                dtypes[short_dtype(p.dtype)] = dtypes.get(short_dtype(p.dtype), 0) + whole_size(p)
        self._script = {
            "libraries": name_callers(sys._getframe(2), self._state.optimizers),  # pyright: ignore[reportPrivateUsage]
            "models": tuple(models),
            "optimizers": tuple(type(o).__name__ for o in self._state.optimizers),
            "parameters": sum(dtypes.values()),
            "dtypes": dtypes,
            "device": trained[0].device.type if trained else "cpu",
            "settings": _numbers_of(self._state.optimizers[0]) if self._state.optimizers else {},
            "dropout": checks.has_dropout(self._state),
            "batch_norms": checks.unsynced_batch_norms(self._state),
            "uneven": checks.expects_uneven_batches(self._state),
            "splits_tensors": checks.splits_tensors(self._state),
        }
        if self._log is not None:
            label = ", ".join(dict.fromkeys(filter(None, (wrapper_of(m, wrappers) for m in self._state.models))))
            self._log.note(
                "start",
                strategy=f"observed: {label or 'no wrapper'}",
                size=self._place["size"],
                parameters=self._script["parameters"],
            )
            self.write("")  # `unipar runs` tells by the process's number whether it is alive

    # What happens in a step

    def add_epoch(self, loader: Any) -> None:
        """Note that the script iterates over a loader anew."""
        self.batches.begin_epoch(loader)
        self._repeats = False

    def add_batch(self, batch: Any) -> None:
        """Note a batch of the script's loader."""
        if torch.is_grad_enabled():
            self._repeats |= self.batches.add(batch)

    def add_unscaled(self, scaled: Any, loss: Any) -> None:
        """Note the loss that loss scaling has multiplied."""
        if isinstance(scaled, Tensor) and isinstance(loss, Tensor):
            self._unscaled = id(scaled), loss.detach()

    def add_backward(self, tensors: Any, step: int, number: int) -> None:
        """Note the tensor that is given to the `number`-th backward of a step."""
        if self._repeats:  # only now it is an epoch that trains, and none of an evaluation
            self.add_fault(
                LocalFault(
                    kind="repeated order",
                    step=step,
                    detail="the first batches of an epoch are those of the epoch before, though the sampler shuffles",
                )
            )
        if self._logged_now:
            loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
            if isinstance(loss, Tensor) and loss.numel() == 1:
                known, unscaled = self._unscaled
                self._backward_losses.append(unscaled if known == id(loss) else loss.detach())
        if number == 1 and step in self._settings.checks:
            self._random[step] = digest_tensor(generator_state(self.device))

    def add_clip(self, step: int, norm: Tensor | float, limit: Any) -> None:
        """Note the norm that a clip returns."""
        if self._logged_now:
            self._norms[step] = float(norm)
            self._clip = float(limit) if isinstance(limit, int | float) else None

    def before_update(self, optimizer: Optimizer, step: int) -> None:
        """Note what an optimizer is given."""
        if not self._notes_update:
            return
        if self._settings.loss is not None and self._logged_now:
            file, _, name = self._settings.loss.rpartition(":")
            self._loss = find_variable(sys._getframe(2), file, name)  # pyright: ignore[reportPrivateUsage]
        if self._logged_now:
            self._rates[step] = tuple(rate for group in optimizer.param_groups if (rate := _rate_of(group)) is not None)
        if step in self._settings.checks:
            self._split |= checks.has_parts(optimizer)
            self._gradient_norms |= checks.gradient_norms(optimizer)
            self._given_rates |= checks.learning_rates(optimizer)
            self._gradients |= checks.digest_gradients(self._state, optimizer)
            if not self._before:
                self._before = checks.digest_weights(self._state)
            for fault in checks.find_weights_outside(self._state, step):
                self.add_fault(fault)

    def _check_step(self, step: int) -> None:
        """Compare what a step has made of the weights, when the script has gone on: libraries gather them after it."""
        after = checks.digest_state(self._state, step, self._gradients)
        self._states[step] = after
        self._norms_after[step] = math.hypot(*self._gradient_norms.values())
        for fault in chain(
            checks.find_idle_update(
                self._state, step, self._gradient_norms, self._given_rates, self._before, after.weights
            ),
            checks.find_coarse_dtypes(self._state, step),
        ):
            self.add_fault(fault)
        self._before, self._gradients, self._gradient_norms, self._given_rates = {}, {}, {}, {}

    def add_fault(self, fault: LocalFault) -> None:
        """Note a fault; of each kind the first counts."""
        self._faults.setdefault(fault.kind, fault)

    def add_step(
        self,
        step: int,
        seconds: float | None,
        phases: Mapping[Phase, float],
        waited: float | None,
        backwards: int,
        skipped: bool,
    ) -> None:
        """Note a step that has ended; `seconds` is None if something was recorded in it."""
        self._steps = step
        self._skipped += skipped
        if self._logged_now and (norm := self._norm_of_library()) is not None:
            self._norms.setdefault(step, norm)
        self._check_schedule(step, skipped=skipped)
        if self._before:
            self._check_step(step)
        if seconds is not None:
            self._seconds += seconds
            self._logged += 1
            self._times.append(seconds)
            self._phases.append(phases)
            if waited is not None:
                self._waited += waited
                self._clocked += seconds
        if len(self._backwards) < FIRST_STEPS:
            self._backwards.append(backwards)
        if self._logged_now:
            self._write_step(step)

    def _norm_of_library(self) -> float | None:
        """Return the gradient norm that a library has computed for its own clip, or None."""
        norms = (library.norm_before_clip(m) for m in self._state.models for library in self._state.libraries)
        return next((norm for norm in norms if norm is not None), None)

    def _check_schedule(self, step: int, *, skipped: bool) -> None:
        if not self.schedule_steps:
            return
        calls = max(self.schedule_steps.values())
        self.schedule_steps.clear()
        if calls > 1 and calls == self._place.get("size") and not skipped:
            self.add_fault(
                LocalFault(
                    kind="schedule too fast",
                    step=step,
                    detail=f"the learning rate's schedule took {calls} steps in one step of the optimizer, as many as "
                    "there are ranks",
                )
            )

    def _write_step(self, step: int) -> None:
        loss = self._loss
        if loss is None and self._backward_losses:
            loss = sum(float(value) for value in self._backward_losses)
        self._backward_losses.clear()
        if loss is not None and len(self._losses) < FIRST_STEPS:
            self._losses.append(loss)
        if self._log is None:
            return
        fields: dict[str, Any] = {"step": step, "loss": loss, "norm": self._norms.get(step)}
        if rates := self._rates.get(step):
            fields["lr"] = rates[0] if len(set(rates)) == 1 else list(rates)
        if self._logged:
            fields |= self._speed(self._seconds / self._logged)
        self._log.note("step", **fields)
        self._seconds, self._logged = 0.0, 0

    def _speed(self, seconds: float) -> dict[str, float | None]:
        """Return the fields on the time of a step; samples and tokens are known only if the user has said them."""
        samples, tokens = self._settings.samples, self._settings.tokens
        fields: dict[str, float | None] = {"seconds": seconds}
        if samples is not None:
            fields |= {"samples": samples, "samples_per_second": samples / seconds}
        if tokens is not None:
            fields["tokens_per_second"] = tokens / seconds
        if self._clocked:
            fields["waiting"] = self._waiting
        return fields

    @property
    def _waiting(self) -> float | None:
        return self._waited / self._clocked if self._clocked else None

    # Files

    def write(self, lost_memory: str) -> None:
        """Write what was observed until now."""
        if self._log is None:
            return
        names: set[Phase] = {name for phases in self._phases for name in phases}
        notes = [*self._notes, *([lost_memory] if lost_memory else [])]
        rank = ObservedRank(
            **self._place,
            **self._script,
            steps=self._steps,
            begun=self._begun,
            skipped=self._skipped,
            seconds=median(self._times) if self._times else None,
            phases={name: median(phases.get(name, 0.0) for phases in self._phases) for name in sorted(names)},
            waiting=self._waiting,
            work=self._work,
            backwards=tuple(self._backwards),
            losses=tuple(self._losses),
            batches=tuple(self.batches.first),
            first_dimension=self.batches.dimension,
            norms=self._norms,
            norms_after=self._norms_after,
            clip=self._clip,
            split=self._split,
            rates=self._rates,
            random=self._random,
            initial=self._initial,
            states=self._states,
            faults=tuple(self._faults.values()),
            notes=tuple(notes),
            recipe=self.recipe.made,
        )
        write_file_atomically(observed_rank_path(self._settings.folder, self._place["rank"]), rank.model_dump_json())

    def end(self, lost_memory: str, *, in_step: bool, compare: bool) -> None:
        """Write all, at the end of the process; `in_step`: within a step; `compare`: with the values at the end."""
        if compare and self._steps and self._state.models:
            self._states[LAST_STEP] = checks.digest_state(self._state, self._steps, {})
        self._begun = self._steps + in_step
        self.write(lost_memory)
        if self._log is not None:
            self._log.note("end", steps=self._steps, peak_rss=anonymous_memory("VmHWM"))
            self._log.close()


def _rate_of(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of an optimizer's group; None if the optimizer chooses it itself."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def _claim(folder: Any, rank: int) -> bool:
    """Return whether no other process of the command has this number."""
    try:
        os.close(os.open(run_log_path(folder, rank), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def _device_of(state: ScriptState) -> torch.device:
    return next((p.device for _, p in state.named_parameters()), torch.device("cpu"))


def _describe_model(model: nn.Module, wrappers: Mapping[str, str]) -> str:
    """Return the classes of a model from the outermost wrapper to the user's own, and the module of that."""
    layers = list(layers_of(model, wrappers))
    return f"{' > '.join(_class_name(layer, wrappers) for layer in layers)} ({_own_class(layers[-1]).__module__})"


def _class_name(model: nn.Module, wrappers: Mapping[str, str]) -> str:
    own, label = _own_class(model).__name__, wrapper_of(model, wrappers)
    return label if label and own in wrappers else f"{label} {own}".strip()


def _own_class(model: nn.Module) -> type:
    """Return the class that the user has written, of which fully_shard makes a subclass."""
    bases = type(model).__bases__
    return bases[-1] if len(bases) > 1 and bases[0].__name__ == "FSDPModule" else type(model)


def _numbers_of(optimizer: Optimizer) -> dict[str, float]:
    """Return the settings of an optimizer's first group that are numbers; pairs such as betas count one by one."""
    found: dict[str, float] = {}
    for key, value in optimizer.param_groups[0].items():
        if isinstance(value, tuple | list) and key != "params":
            found |= {f"{key}[{i}]": float(v) for i, v in enumerate(value) if isinstance(v, int | float)}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[str(key)] = float(value)
    return found
