"""`log.memory`: memory that a rank allocates in logged steps, by phase and category."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Protocol, final

from unipar.backend import Backend, Category, Engine
from unipar.distributed.device import bytes_allocated, forget_peaks, has_own_memory, peak_bytes_allocated
from unipar.distributed.world import World
from unipar.memory.account import MEMORY_PHASES, PhaseName, PhasePeak
from unipar.memory.recording.held_bytes import bytes_held_by
from unipar.memory.recording.watcher import MemoryRecorder
from unipar.memory.sources.events import MEMORY_PHASE_OF
from unipar.memory.sources.malloc_build import MeterUnavailable, build_meter
from unipar.memory.sources.malloc_meter import MallocMeter
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.utils.procfs import anonymous_memory, reset_resident_peak

FOLD_AFTER_NOTES: Final = 1 << 20
"""Number of the meter's records after which they are folded, even if no step is logged."""


class StepMemory(Protocol):
    """Recorder of memory for logged steps."""

    said: str
    """Description of how allocations are counted."""

    @property
    def lost(self) -> str:
        """Reason why memory is no longer recorded; empty while it is."""
        ...

    def begin(self, world: World, heartbeat: HeartbeatWriter) -> None:
        """Set the base: called when the ranks have met, before anything is built."""
        ...

    def follow(self, engines: Sequence[Engine]) -> None:
        """Name memory by what `engines` hold: called when all is built."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Context manager around the making of the data."""
        ...

    def before(self, *, logs: bool) -> None:
        """Note that a step begins; `logs` says whether it is one to record."""
        ...

    def after(self) -> list[PhasePeak]:
        """End a recorded step and return the peak of each phase."""
        ...


def choose_step_memory(backend: Backend, world: World, run: Path) -> StepMemory:
    """Return the most precise recorder that works here; that of the meter also writes accounts into the run folder."""
    if has_own_memory(world.device):
        return _CounterStepMemory("the counters of torch's allocator are shown")
    if MallocMeter.here():
        return _MeterStepMemory(backend, run)
    try:
        build_meter()
        why = f"{world.place.launcher} started this process without the meter, which must be preloaded at its start"
    except MeterUnavailable as e:
        why = str(e)
    return _CounterStepMemory(f"resident memory as the system counts it is shown, not each allocation: {why}")


@final
class _MeterStepMemory:
    """Recorder of each block by the meter, attributed as in a comparison."""

    said = "each block is counted by a preloaded meter"

    def __init__(self, backend: Backend, run: Path) -> None:
        self._run = run
        self._meter = MallocMeter()
        self._watching = MemoryRecorder.of_backend(backend, [self._meter])
        self._begun = False

    def begin(self, world: World, heartbeat: HeartbeatWriter) -> None:
        self._watching.begin(world, heartbeat)

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
    """Recorder of each phase's peak by a counter; what engines hold at a phase's end has a category, the rest none."""

    lost = ""

    def __init__(self, said: str) -> None:
        self.said = said
        self._engines: Sequence[Engine] = ()
        self._on = False

    def begin(self, world: World, heartbeat: HeartbeatWriter) -> None:
        self._device = world.device
        self._base = self._now()
        self._phase: PhaseName | None = "built"
        self._clear()
        heartbeat.on_phase = self._mark
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
        peaks = [self._peaks[name] for name in MEMORY_PHASES if name in self._peaks]
        self._clear()
        return peaks

    def _clear(self) -> None:
        self._peaks: dict[PhaseName, PhasePeak] = {}

    def _mark(self, phase: str) -> None:
        if self._on:
            self._close()
            self._phase = MEMORY_PHASE_OF.get(phase)
            self._forget()

    def _close(self) -> None:
        """End the current phase; keep its peak if it is the highest of that phase's name."""
        if self._phase is None:
            return
        peak = self._most() - self._base
        before = self._peaks.get(self._phase)
        if before is not None and before.peak >= peak:
            return
        parts: dict[Category, int] = bytes_held_by(self._engines, self._device.type)
        parts["unattributed"] = peak - sum(parts.values())
        self._peaks[self._phase] = PhasePeak(name=self._phase, peak=peak, held=parts)

    def _now(self) -> int:
        return bytes_allocated(self._device) if has_own_memory(self._device) else anonymous_memory()

    def _most(self) -> int:
        return peak_bytes_allocated(self._device) if has_own_memory(self._device) else anonymous_memory("VmHWM")

    def _forget(self) -> None:
        if has_own_memory(self._device):
            forget_peaks(self._device)
        else:
            reset_resident_peak()
