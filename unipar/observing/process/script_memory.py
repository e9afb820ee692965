"""`ScriptMemory`: memory of an observed script, recorded in some of its steps as a comparison records it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from unipar.backend import Category, Holding
from unipar.distributed.world_machines import WorldMachines
from unipar.memory.account import RecordingPass
from unipar.memory.recording.bytes_sent_recorder import CollectiveMode
from unipar.memory.recording.watcher import MemoryRecorder, PhaseSignal, TensorHolder, choose_event_sources
from unipar.memory.sources.malloc_meter import MallocMeter
from unipar.observing.libraries import libraries_here


@dataclass(frozen=True)
class ScriptGroups:
    """Process groups of a script, each an axis of its own: that of all ranks is the data's, others have their ranks."""

    ranks: int

    def axes_among(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the name of the group of these ranks."""
        members = sorted(ranks)
        return ("data",) if len(members) == self.ranks else (f"ranks {', '.join(map(str, members))}",)


@dataclass
class ScriptWorld:
    """Place of the observed process; rank and size are known when the script has met the other ranks."""

    device: torch.device
    rank: int = 0
    size: int = 1
    machines: WorldMachines = field(default_factory=lambda: WorldMachines.one(1))

    @property
    def mesh(self) -> ScriptGroups:
        """Process groups of the script."""
        return ScriptGroups(self.size)


@final
class ScriptMemory:
    """Recorder of a script's memory: call sites in the first recorded step, bytes sent in the second, peaks in all."""

    def __init__(self, steps: tuple[int, int], sites: Mapping[str, Category], holder: TensorHolder) -> None:
        self._first, self._last = steps
        self._sites = sites
        self._holder = holder
        self._named: _CollectiveTensors | None = None
        self.recorder: MemoryRecorder | None = None
        self.world = ScriptWorld(torch.device("cpu"))
        self.missing = ""
        """Reason why no memory is recorded; "" if it is."""

    def begin(self, device: torch.device, phases: PhaseSignal) -> None:
        """Set the base mark, before the script makes a model; on a device, when its context is made."""
        self.world.device = device
        if device.type == "cpu" and not MallocMeter.here():
            self.missing = (
                "no account of memory: this process was started without the meter, as a static binary or "
                "`env -i` starts it, or another allocator is preloaded"
            )
            return
        preload = os.environ.get("LD_PRELOAD")
        self.recorder = MemoryRecorder(choose_event_sources(device), self._sites, sends=_library_sends)
        self.recorder.begin_here(self.world, phases)
        if preload is not None:  # processes that this one starts, such as ranks, are observed as well
            os.environ["LD_PRELOAD"] = preload
        self.recorder.follow([self._holder])

    def know_place(self, rank: int, size: int, machines: int) -> None:
        """Note rank and size of the world, which the script has met by now."""
        self.world.rank, self.world.size = rank, size
        self.world.machines = WorldMachines.one(size) if machines == 1 else WorldMachines.filled(size, size // machines)

    def step_begins(self, step: int) -> None:
        """Begin to record a step, if it is one of those."""
        if self._is_recorded(step) and (recorder := self.recorder) is not None and not recorder.ended:
            how = self._recording_pass(step)
            if how == "placed":
                self._named = _CollectiveTensors(recorder)
                self._named.__enter__()
            recorder.before(how)

    def step_ends(self, step: int, folder: Path) -> bool:
        """End to record it; return whether the account was written, because it was the last."""
        recorder = self.recorder
        if recorder is None or not recorder.on:
            return False
        recorder.between(last=step >= self._last)
        if self._named is not None:
            self._named.__exit__(None, None, None)
            self._named = None
        if step < self._last:
            return False
        self._write(folder)
        return True

    def end(self, folder: Path) -> None:
        """Write what was recorded, if the script ends before the last step to record."""
        recorder = self.recorder
        if recorder is None or recorder.ended:
            return
        recorder.end_after_error(RuntimeError("the script ended"))
        self._write(folder)

    def drop(self) -> None:
        """End recording without an account, because observing ends."""
        if self.recorder is not None and not self.recorder.ended:
            self.recorder.lose(RuntimeError("observing ended"))

    @property
    def lost(self) -> str:
        """Reason why there is no account, or ""."""
        if self.recorder is None:
            return self.missing
        return f"no account of memory: {self.recorder.lost}" if self.recorder.lost else ""

    def _is_recorded(self, step: int) -> bool:
        return self._first <= step <= self._last

    def _recording_pass(self, step: int) -> RecordingPass:
        return {0: "placed", 1: "sent"}.get(step - self._first, "plain")  # pyright: ignore[reportReturnType]

    def _write(self, folder: Path) -> None:
        if self.recorder is not None:
            self.recorder.write_account(folder)


def _library_sends() -> AbstractContextManager[Mapping[str, int]] | None:
    """Return what counts the bytes that a library of the script sends without torch.distributed, or None."""
    return next((counting for library in libraries_here() if (counting := library.sends()) is not None), None)


@final
class _CollectiveTensors(CollectiveMode):
    """Dispatch mode that names what collectives are given, such as the buckets of a wrapper."""

    def __init__(self, recorder: MemoryRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @override
    def call(self, kind: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for tensor in tree_leaves((args, out)):
            if isinstance(tensor, Tensor):
                self._recorder.name(Holding("communication", f"given to {kind}", tensor))
        return out
