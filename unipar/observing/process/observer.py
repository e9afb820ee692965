"""`Observer`: one observed process, from the first model that it makes to its end."""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, Final, ParamSpec, final

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _python_dispatch as python_dispatch
from torch.utils.data import dataloader

from unipar.backend.resources import find_foreign_place
from unipar.backend.torch_libraries import TORCH_CALL_SITES
from unipar.distributed.accelerators import find_visible_devices
from unipar.distributed.device import when_context_is_made
from unipar.errors import UniparError
from unipar.observing.libraries import known_libraries, libraries_here
from unipar.observing.process.patches import Patches
from unipar.observing.process.rank_record import RankRecord
from unipar.observing.process.script_flops import COUNTED_STEP, ScriptFlops
from unipar.observing.process.script_memory import ScriptMemory
from unipar.observing.process.script_state import ScriptState
from unipar.observing.process.step_phases import StepPhases
from unipar.observing.settings import ObserveSettings
from unipar.profiling.waiting import SleepClock

RAISE_VARIABLE: Final = "UNIPAR_OBSERVE_RAISE"
"""Environment variable with which tests let an observer's own error end the script."""

_BACKWARDS_WITHOUT_UPDATE: Final = 3
"""Number of backwards after which a script without an optimizer's step is taken to update its weights itself."""

_CLOCKED_FIRST: Final = 10
_CLOCKED_EVERY: Final = 8
"""First steps after the recorded ones in which waiting is measured, and the distance of later ones: it takes 20 us."""

HookArguments = ParamSpec("HookArguments")


def _harmless(
    act: Callable[Concatenate[Observer, HookArguments], None],
) -> Callable[Concatenate[Observer, HookArguments], None]:
    """Decorate a method so that its error ends the observing, and not the script."""

    @wraps(act)
    def guarded(self: Observer, *args: HookArguments.args, **kwargs: HookArguments.kwargs) -> None:
        if self.stopped or get_ident() != self.thread:
            return
        try:
            act(self, *args, **kwargs)
        except Exception as e:  # the script must go on, whatever we do wrong
            if os.environ.get(RAISE_VARIABLE):
                raise
            self.stop(f"{type(e).__name__}: {e}")

    return guarded


@final
class Observer:
    """Observer of the process that trains; it calls no collective and changes no value."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self.thread = get_ident()
        self.stopped = ""
        """Reason why observing has stopped; "" while it goes on."""

        self.settings = ObserveSettings.from_environment()
        self.phases = StepPhases(self)
        self.state = ScriptState(libraries := known_libraries())
        sites = dict(TORCH_CALL_SITES)
        for library in libraries:
            sites |= library.sites
        self.memory = ScriptMemory(self.settings.steps, sites, self.state)
        self.record = RankRecord(self.settings, self.state)
        self._flops = ScriptFlops(self.phases)
        self._clock: SleepClock | None = None
        self._clock_runs = self._clocked = False
        """Whether the clock counts now, and whether it does in this step."""

        self._ended_at: float | None = None
        self._pid = os.getpid()
        self._backward_depth = 0
        self._computing: Optimizer | None = None
        """Optimizer that has begun a step in which it calls backward."""

    @_harmless
    def begin(self) -> None:
        """Patch what a training loop calls, and begin to record memory."""
        around, keep = self._patches.around, self._patches.keep
        for owner in (Optimizer, nn.Module):
            around(owner, "zero_grad", after=self.gradients_dropped)
        around(torch.autograd, "backward", before=self.backward_begins, after=self.backward_ends)
        around(dataloader._BaseDataLoaderIter, "__next__", before=self.data_begins, after=self.data_ends)  # pyright: ignore[reportPrivateUsage]
        around(dataloader.DataLoader, "__iter__", before=self.epoch_begins)
        around(Optimizer, "__init__", after=self.optimizer_made)
        around(torch.autocast, "__enter__", before=self.autocast_entered)
        around(lr_scheduler.LRScheduler, "step", before=self.schedule_stepped)
        around(torch.amp.GradScaler, "scale", after=self.loss_scaled)  # pyright: ignore[reportPrivateImportUsage]
        around(torch.amp.GradScaler, "update", before=lambda *_, **__: self.scaler_updated())  # pyright: ignore[reportPrivateImportUsage]
        if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
            around(
                fsdp.FullyShardedDataParallel,
                "clip_grad_norm_",
                before=self.clip_begins,
                after=self._clip_of_model_ends,
            )
        keep(register_optimizer_step_pre_hook(self.update_begins))
        keep(register_optimizer_step_post_hook(self.update_ends))
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._forked)
        if self.settings.memory:
            self._begin_memory()

    def _begin_memory(self) -> None:
        """Begin to record; the history of an accelerator's allocator begins with its context, made by the script."""
        _import_what_optimizers_import()
        kind = find_visible_devices().type
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if not kind or not when_context_is_made(kind, local_rank, self._begin_memory_on):
            self.memory.begin(torch.device("cpu"), self.phases)

    @_harmless
    def _begin_memory_on(self, device: torch.device) -> None:
        self.memory.begin(device, self.phases)

    def _forked(self) -> None:
        """Go on in a forked rank; leave a forked data worker, or a process that has trained, alone."""
        self._pid = os.getpid()
        if self.phases.step:
            self.stopped = "this process was forked from one that trains"
        else:
            self.memory.missing = "no account of memory: the rank was forked from a process with a model"
            self.memory.recorder = None

    def stop(self, reason: str) -> None:
        """Put everything back and say why, once."""
        self.stopped = reason
        self._patches.undo()
        self.memory.drop()
        self._flops.drop()
        self.record.note(f"observing stopped in step {self.phases.step}: {reason}")
        sys.stderr.write(f"unipar observe: stopped in step {self.phases.step}: {reason}\n")

    # What the script calls

    @_harmless
    def data_begins(self, *_: Any, **__: Any) -> None:
        if self._clock_runs:
            self._pause_clock()
        self.phases.data_begins()

    @_harmless
    def data_ends(self, batch: Any, iterator: Any, *_: Any, **__: Any) -> None:
        self.phases.data_ends(trains=torch.is_grad_enabled())
        if self.record.recipe.open:
            self.record.recipe.batch_read(batch, iterator)
        self.record.add_batch(batch)
        if self._clocked:
            self._resume_clock()

    @_harmless
    def epoch_begins(self, loader: Any) -> None:
        self.state.add_dataset(loader.dataset)
        self.record.add_epoch(loader)
        self.record.recipe.epoch_begun(loader)

    @_harmless
    def gradients_dropped(self, *_: Any, **__: Any) -> None:
        self.phases.gradients_dropped()

    @_harmless
    def loss_scaled(self, scaled: Any, scaler: Any, loss: Any) -> None:
        self.record.add_unscaled(scaled, loss)
        self.record.recipe.loss_scaling |= scaler.is_enabled()

    @_harmless
    def backward_begins(self, tensors: Any, *_: Any, **__: Any) -> None:
        self._backward_depth += 1
        if self._backward_depth > 1:
            return  # a backward within a backward: recomputed activations
        if self.phases.backwards == _BACKWARDS_WITHOUT_UPDATE and not self.record.opened:
            self.state.look_again()
        self.phases.backward_begins()
        if self.record.recipe.open:
            self.record.recipe.backward_called()
        self.record.add_backward(tensors, self.phases.step, self.phases.backwards)

    @_harmless
    def backward_ends(self, *_: Any, **__: Any) -> None:
        self._backward_depth -= 1
        if self._backward_depth:
            return
        self.phases.backward_ends()
        if (optimizer := self._computing) is not None:
            self._computing = None
            self.record.before_update(optimizer, self.phases.step)

    @_harmless
    def clip_begins(self, *_: Any, **__: Any) -> None:
        self.phases.clip_begins()

    def _clip_of_model_ends(self, norm: Any, model: Any, max_norm: Any, *_: Any, **__: Any) -> None:
        self.clip_ends(norm, max_norm)

    @_harmless
    def clip_ends(self, norm: Any, limit: Any, norm_type: Any = 2.0) -> None:
        self.record.recipe.norm_type = float(norm_type)
        if self.phases.step and isinstance(norm, Tensor | float):
            self.record.add_clip(self.phases.step, norm, limit)

    @_harmless
    def schedule_stepped(self, schedule: Any, *_: Any, **__: Any) -> None:
        if getattr(schedule, "last_epoch", 0) >= 0:  # a schedule takes its first step when it is made
            self.record.schedule_steps[id(schedule)] += 1
        self.record.recipe.schedule_stepped(schedule)

    @_harmless
    def module_made(self, module: Any) -> None:
        self.record.recipe.module_made(module)

    @_harmless
    def optimizer_made(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        self.record.recipe.optimizer_made(optimizer)

    @_harmless
    def autocast_entered(self, context: Any) -> None:
        self.record.recipe.autocast_entered(context)

    @_harmless
    def scaler_updated(self) -> None:
        self.phases.scaler_updated()

    @_harmless
    def update_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = self.state.knows(optimizer)
        if not known:
            if _wraps_another(optimizer):
                return
            self.phases.keep_optimizers({id(o) for o in self.state.optimizers})
        self.phases.update_begins(id(optimizer))
        if not known:
            self.state.add(optimizer)
            self._find_place()
            self.record.describe()
        # a function among the arguments computes the gradients
        if (len(args) > 1 or kwargs) and any(map(callable, (*args[1:], *kwargs.values()))):
            self._computing = optimizer
        else:
            self.record.before_update(optimizer, self.phases.step)

    @_harmless
    def update_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if self.state.knows(optimizer):
            self.phases.update_ends()

    # What the phases say

    def on_step_begin(self, step: int) -> None:
        """Begin to record memory and waiting, if the step is one of those."""
        self.record.begin_step(step)
        since = step - self.settings.steps[1]
        if since <= 0:
            self.memory.step_begins(step)
            self._flops.step_begins(step)
        self._clocked = since > 0 and (since <= _CLOCKED_FIRST or since % _CLOCKED_EVERY == 0)
        if self._clocked:
            self._begin_clock()

    def on_step_end(self, step: int) -> None:
        """Write the step to the run log."""
        if self._clock_runs:
            self._pause_clock()
        if step <= COUNTED_STEP:
            self._end_counting(step)
        now = time.perf_counter()
        recorded = step <= self.settings.steps[1] or step in self.settings.checks
        seconds = None if self._ended_at is None or recorded else now - self._ended_at
        self._ended_at = now
        waited = self._clock.seconds if self._clocked and self._clock is not None else None
        self.record.add_step(step, seconds, self.phases.seconds, waited, self.phases.backwards, self.phases.skipped)
        if recorded and (self.memory.step_ends(step, self.settings.folder) or step in self.settings.checks):
            self.record.write(self.memory.lost)
            self._ended_at = time.perf_counter()

    def _end_counting(self, step: int) -> None:
        self._flops.step_ends(step, self.record.device)
        if self._flops.work is not None:
            self.record.add_work(self._flops.work)

    def on_steps_merged(self) -> None:
        """Begin to count anew: another optimizer belongs to each step."""
        self.record.forget_steps()

    def _find_place(self) -> None:
        """Find rank and size, which the script knows when its optimizer takes its first step."""
        here = next((place for library in libraries_here() if (place := library.place()) is not None), None)
        grouped = dist.is_available() and dist.is_initialized()
        if grouped:
            here = dist.get_rank(), dist.get_world_size()
        try:
            launched = find_foreign_place()
        except UniparError:
            launched = None
        rank, size = here or (0, 1)
        machines = 1 if launched is None or launched.size != size else max(1, size // max(1, launched.local_size))
        self.memory.know_place(rank, size, machines)
        self.record.open(rank, size, 1 if launched is None else launched.size, socket.gethostname())

    def end(self) -> None:
        """Write what was observed, at the end of the process."""
        if os.getpid() != self._pid or not (self.record.opened or self.phases.backwards):
            return
        try:
            if not self.stopped:
                self._open_without_update()
                self._ended_at = None  # the last step's time would have all that came after it
                self.phases.finish()
                self.memory.end(self.settings.folder)
            self.record.end(self.memory.lost, in_step=self.phases.backwards > 0, compare=not self.stopped)
        except Exception as e:  # the process is ending with the script's own exit code
            sys.stderr.write(f"unipar observe: the end was not written: {type(e).__name__}: {e}\n")

    def _open_without_update(self) -> None:
        """Write of a script that updates its weights itself what can be known without steps."""
        if not self.record.opened:
            if not self.state.models:
                self.state.look_again()
            self._find_place()
            self.record.describe(updated=True)
            self.record.note("no optimizer of torch took a step, so no steps were found: memory is shown by phase")

    # Waiting

    def _open_clock(self) -> SleepClock | None:
        try:
            return SleepClock()
        except OSError:
            return None

    def _begin_clock(self) -> None:
        if self._clock is None:
            self._clock = self._open_clock()
        if self._clock is not None:
            self._clock.seconds = 0.0
        self._resume_clock()

    def _pause_clock(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        self._clock_runs = False

    def _resume_clock(self) -> None:
        if self._clock is not None:
            self._clock.start()
            self._clock_runs = True


def _import_what_optimizers_import() -> None:
    """Import what torch imports with the first optimizer that is made, so that no account has it.

    Under a mode that changes what torch's functions return, such as a default device, nothing is imported.
    """
    if not overrides._get_current_function_mode_stack() and not python_dispatch._get_current_dispatch_mode_stack():  # pyright: ignore[reportPrivateUsage]
        importlib.import_module("torch._dynamo")


def _wraps_another(optimizer: Optimizer) -> bool:
    """Return whether an optimizer only calls another one, which is seen as well."""
    return isinstance(getattr(optimizer, "optimizer", None), Optimizer)
