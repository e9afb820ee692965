"""`log.memory`: what a rank allocates in the steps that log, by phase and category; others are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Protocol, final

import torch

from unipar.backend import Backend, Category, Engine
from unipar.distributed.world import World
from unipar.memory.account import MEMORY_PHASES, PhaseName, PhasePeak
from unipar.memory.recording.holdings import bytes_held_by
from unipar.memory.recording.watcher import MemoryRecorder
from unipar.memory.sources.events import MEMORY_PHASE_OF
from unipar.memory.sources.malloc import MallocMeter
from unipar.memory.sources.malloc_build import MeterUnavailable, build_meter
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.utils.procfs import anonymous_memory, reset_resident_peak

FOLD_AFTER_NOTES: Final = 1 << 20
"""Notes of the meter after which they are folded, though no step logs."""


class StepMemory(Protocol):
    """Begun where the ranks have met; told where steps begin, and where those that log end."""

    said: str
    """How it sees what is allocated."""

    @property
    def lost(self) -> str:
        """Why it does not any more."""
        ...

    def begin(self, world: World, heart: HeartbeatWriter) -> None: ...

    def follow(self, engines: Sequence[Engine]) -> None:
        """All is built."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Around the making of the data."""
        ...

    def before(self, *, logs: bool) -> None: ...

    def after(self) -> list[PhasePeak]: ...


def choose_step_memory(backend: Backend, world: World, run: Path) -> StepMemory:
    """The best that can be had in this process; an account of the last step that logged lies in the run's folder."""
    if world.device.type == "cuda":
        return _CounterStepMemory("torch's allocator counts what is allocated")
    if MallocMeter.here():
        return _MeterStepMemory(backend, run)
    try:
        build_meter()
        why = f"{world.place.launcher} started this process, which must begin with the meter to be counted"
    except MeterUnavailable as e:
        why = str(e)
    return _CounterStepMemory(f"what the system counts is shown, not what is allocated: {why}")


@final
class _MeterStepMemory:
    """Each block by the meter, named as in a comparison."""

    said = "each block is counted by a preloaded meter"

    def __init__(self, backend: Backend, run: Path) -> None:
        self._run = run
        self._meter = MallocMeter()
        self._watching = MemoryRecorder(backend, [self._meter])
        self._begun = False

    def begin(self, world: World, heart: HeartbeatWriter) -> None:
        self._watching.begin(world, heart)

    def follow(self, engines: Sequence[Engine]) -> None:
        self._watching.follow(engines)

    def reading(self) -> AbstractContextManager[None]:
        return self._watching.reading()

    def before(self, *, logs: bool) -> None:
        if self._begun and (logs or self._meter.at() > self._folded + FOLD_AFTER_NOTES):
            self._meter.fold()
            self._watching.forget()
        self._begun, self._folded = True, self._meter.at()
        if logs:
            self._watching.before("plain")

    def after(self) -> list[PhasePeak]:
        account = self._watching.read(self._run)
        return [] if account is None else list(account.phases)

    @property
    def lost(self) -> str:
        return self._watching.lost


@final
class _CounterStepMemory:
    """The fullest moment of each phase by a counter; of what was there, what engines name."""

    lost = ""

    def __init__(self, said: str) -> None:
        self.said = said
        self._engines: Sequence[Engine] = ()
        self._on = False

    def begin(self, world: World, heart: HeartbeatWriter) -> None:
        self._device = world.device
        self._base = self._now()
        self._phase: PhaseName | None = "built"
        self._clear()
        heart.on_phase = self._mark
        self._forget()

    def follow(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before(self, *, logs: bool) -> None:
        self._on = logs
        if logs and self._phase == "built":
            self._close()
        if logs:
            self._phase = None
            self._forget()

    def after(self) -> list[PhasePeak]:
        self._mark("between")
        self._close()
        self._on = False
        found = [self._found[name] for name in MEMORY_PHASES if name in self._found]
        self._clear()
        return found

    def _clear(self) -> None:
        self._found: dict[PhaseName, PhasePeak] = {}

    def _mark(self, phase: str) -> None:
        if self._on:
            self._close()
            self._phase = MEMORY_PHASE_OF.get(phase)
            self._forget()

    def _close(self) -> None:
        """A phase is over: the fullest of its name is kept."""
        if self._phase is None:
            return
        peak = self._most() - self._base
        before = self._found.get(self._phase)
        if before is not None and before.peak >= peak:
            return
        parts: dict[Category, int] = bytes_held_by(self._engines, self._device.type)
        parts["unattributed"] = peak - sum(parts.values())
        self._found[self._phase] = PhasePeak(name=self._phase, peak=peak, held=parts)

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else anonymous_memory()

    def _most(self) -> int:
        return (
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else anonymous_memory("VmHWM")
        )

    def _forget(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_resident_peak()
