"""`MemoryRecorder`: records the phases of a run and the names and places of its blocks, beside allocation events."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, Self, final

import torch
from torch import Tensor, nn

from unipar.backend import Backend, Category, Holding
from unipar.distributed.device import has_own_memory, wait_for_late_frees
from unipar.distributed.world import World
from unipar.distributed.world_machines import WorldMachines
from unipar.memory.account import UNKNOWN_AXIS, MemoryAccount, RecordingPass, ResidentMemory
from unipar.memory.recording.attribution import Attribution, plain_step_seconds
from unipar.memory.recording.bytes_sent_recorder import (
    TRAFFIC_METHOD,
    AxesOfRanks,
    CollectiveCounter,
    Traffic,
    axis_of_ranks,
)
from unipar.memory.recording.held_bytes import find_storages
from unipar.memory.sources.allocator_history import AllocatorHistory
from unipar.memory.sources.event_source import EventSource
from unipar.memory.sources.events import NamedStorage
from unipar.memory.sources.malloc_meter import MallocMeter
from unipar.memory.sources.pinned import PinnedMemory
from unipar.memory.sources.profiler import ProfilerSource
from unipar.utils.procfs import anonymous_memory, shared_bytes

MethodArguments = ParamSpec("MethodArguments")


def _stop_on_error(
    act: Callable[Concatenate[MemoryRecorder, MethodArguments], None],
) -> Callable[Concatenate[MemoryRecorder, MethodArguments], None]:
    """Decorate a method so that its error ends the recording, and not the training that is recorded."""

    @wraps(act)
    def guarded(self: MemoryRecorder, *args: MethodArguments.args, **kwargs: MethodArguments.kwargs) -> None:
        if self.lost:
            return
        try:
            act(self, *args, **kwargs)
        except Exception as e:  # sources use private parts of torch and may raise anything
            self.lose(e)

    return guarded


class TensorHolder(Protocol):
    """Whoever keeps tensors of a training and knows their purpose: an engine, or a script that is observed."""

    def holdings(self) -> Iterable[Holding]:
        """Return all tensors that are kept now."""
        ...


class PhaseSignal(Protocol):
    """Source of a training's phases, such as a heartbeat."""

    on_phase: Callable[[str], None] | None
    """Function that is called with each new phase."""


class RecordedWorld(Protocol):
    """Place of the recorded process among the others."""

    rank: int
    size: int
    device: torch.device
    machines: WorldMachines

    @property
    def mesh(self) -> AxesOfRanks:
        """Axes along which the process groups lie."""
        ...


@final
class MemoryRecorder:
    """Recorder of one memory or several, each with a source of events, from the base mark to the last recorded step."""

    def __init__(
        self,
        sources: Sequence[EventSource],
        sites: Mapping[str, Category],
        backend: Backend | None = None,
        sends: Callable[[], AbstractContextManager[Mapping[str, int]] | None] = lambda: None,
    ) -> None:
        """`sites`: category of what functions of a library allocate; `backend`: one whose library may send itself.

        `sends` returns what counts the bytes that a script's library sends itself.
        """
        self._sites, self._backend, self._library_sends = sites, backend, sends
        self._watched = [_RecordedMemory(source) for source in sources]
        self._pinned: PinnedMemory | None = None
        self._marks = 0
        self.ended = False
        """Whether the sources have stopped counting."""

        self.lost = ""
        """Reason why recording ended early; empty if it did not."""

        self._notes: list[str] = []
        for kind in {source.device for source in sources} - {"cpu"}:
            if PinnedMemory.is_counted(kind):
                self._pinned = PinnedMemory(kind)
            else:
                self._notes.append(f"pinned host memory was not recorded: torch.{kind} does not count it")
        self._steps: list[RecordedStep] = []
        self._traffic: Traffic = Counter()
        self._across = 0
        self._library_sent = False
        self._around: ExitStack | None = None
        self._holdings: Callable[[], Iterable[Holding]] = tuple

    @classmethod
    def of_backend(cls, backend: Backend, sources: Sequence[EventSource]) -> Self:
        """Return the recorder of a backend's run."""
        return cls(sources, backend.capabilities.sites, backend)

    def begin(self, world: World, phases: PhaseSignal) -> None:
        """Set the base mark after a small step: called when the ranks have met, before anything is built."""
        run_toy_step(world)
        self.begin_here(world, phases)

    def begin_here(self, world: RecordedWorld, phases: PhaseSignal) -> None:
        """Set the base mark without a step and without the other ranks."""
        self._world, self._phases = world, phases
        self._anonymous = anonymous_memory() - shared_bytes()
        self._begin()

    @_stop_on_error
    def _begin(self) -> None:
        for watched in self._watched:
            watched.source.begin()
        self._anonymous = anonymous_memory() - shared_bytes()
        self._mark("start")
        self._phases.on_phase = self._mark

    def lose(self, error: Exception) -> None:
        """End the recording because of an error; no further account is written."""
        message = str(error).strip()
        self.lost = f"{type(error).__name__}: {message.splitlines()[0] if message else 'no message'}"[:300]
        self._phases.on_phase = None
        self.ended = True
        around, self._around = self._around, None
        with suppress(Exception):
            if around is not None:
                around.close()
        for watched in self._watched:
            with suppress(Exception):
                watched.source.end()

    @_stop_on_error
    def follow(self, holders: Iterable[TensorHolder]) -> None:
        """Name blocks by what `holders` keep from now on: called when all is built."""
        followed = list(holders)
        self._holdings = lambda: chain.from_iterable(holder.holdings() for holder in followed)
        self._name()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Context manager around the making of the data: its memory is not counted as the model's."""
        self._mark("data")
        yield
        self._mark("start")

    @property
    def resident(self) -> int:
        """Bytes of resident memory at the base, plus those of the sources' own records."""
        return self._anonymous + sum(watched.source.bytes for watched in self._watched)

    @property
    def on(self) -> bool:
        """Whether a step is being recorded now."""
        return self._around is not None

    @_stop_on_error
    def before(self, how: RecordingPass) -> None:
        """Begin to record a step."""
        if not self._steps and has_own_memory(self._world.device):
            wait_for_late_frees(self._world.device)
        self._steps.append((how, self._marks, 0))
        self._around = ExitStack()
        if how == "placed":
            for watched in self._watched:
                self._around.enter_context(watched.source.places(self._sites))
        elif how == "saved":
            self._around.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _identity))
        elif how == "sent" and self._world.size > 1:
            self._around.enter_context(self._sending())

    @_stop_on_error
    def between(self, *, last: bool, error: BaseException | None = None) -> None:
        """End a recorded step; after the last one, stop counting."""
        assert self._around is not None
        if error is None:
            self._around.close()
        else:  # context managers learn of the error, so that they do not wait for other ranks
            self._around.__exit__(type(error), error, error.__traceback__)
        self._around = None
        how, low, _ = self._steps[-1]
        self._steps[-1] = how, low, self._marks
        if last:
            self._end()

    def _end(self) -> None:
        self._mark("end")
        self._phases.on_phase = None
        self.ended = True
        for watched in self._watched:
            watched.source.end()

    @_stop_on_error
    def end_after_error(self, error: BaseException) -> None:
        """Stop counting because training failed, and keep the events recorded until now."""
        self._name()
        if self.on:
            self.between(last=True, error=error)
        else:
            self._end()

    @_stop_on_error
    def _mark(self, phase: str) -> None:
        """Record that a phase begins."""
        self._marks += 1
        saving = self.on and self._steps[-1][0] == "saved"
        for watched in self._watched:
            watched.source.mark(phase)
            if saving:
                watched.meets(phase)
        if self._pinned is not None:
            self._pinned.mark(phase)
        if self.on:
            self._name()

    @property
    def _recording_library(self) -> Backend | None:
        """The backend, if the environment makes its library record what it sends itself."""
        variables = self._backend.capabilities.recording if self._backend is not None else {}
        return self._backend if variables and variables.items() <= os.environ.items() else None

    @contextmanager
    def _sending(self) -> Generator[None]:
        library = self._recording_library
        counting = library.sends(self._world) if library and isinstance(self._world, World) else self._library_sends()
        with (
            counting or nullcontext(dict[str, int]()) as by_library,
            CollectiveCounter(self._traffic, self._world.mesh, self._world.machines) as counter,
        ):
            yield
        self._library_sent = bool(by_library)
        self._across += counter.across + (sum(by_library.values()) if self._world.machines.several else 0)
        axis = axis_of_ranks(self._world.mesh, list(range(self._world.size))) or UNKNOWN_AXIS
        self._traffic.update({(axis, kind): size for kind, size in by_library.items()})

    def _sent(self) -> dict[str, Any]:
        """Return the account's fields on what a step sends."""
        sent: Counter[str] = Counter()
        along: dict[str, dict[str, int]] = {}
        for (axis, kind), size in self._traffic.items():
            sent[kind] += size
            along.setdefault(axis, {})[kind] = size
        return {"sent": dict(sent), "sent_along": along, "sent_across": self._across, "sent_by": self._sent_by}

    @property
    def _sent_by(self) -> str:
        if not any(how == "sent" for how, _, _ in self._steps):
            return ""
        library = self._recording_library
        if library is not None:
            return f"{TRAFFIC_METHOD}, and {library.capabilities.records}"
        return f"{TRAFFIC_METHOD}, and of the library's own" if self._library_sent else TRAFFIC_METHOD

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved(tensor)
        return tensor

    @_stop_on_error
    def _saved(self, tensor: Tensor) -> None:
        for storage in find_storages(tensor):
            for watched in self._watched:
                watched.save(storage)

    def _name(self) -> None:
        now = [watched.source.at() for watched in self._watched]
        for holding in self._holdings():
            self._name_at(now, holding)

    @_stop_on_error
    def name(self, holding: Holding) -> None:
        """Name a tensor that exists now, in case that nothing else tells its purpose."""
        self._name_at([watched.source.at() for watched in self._watched], holding, last_resort=True)

    def _name_at(self, positions: Sequence[int], holding: Holding, *, last_resort: bool = False) -> None:
        for storage in find_storages(holding.tensor):
            if self._pinned is not None and storage.device.type == "cpu" and storage.is_pinned():
                self._pinned.name(storage, holding)
                continue
            for watched, at in zip(self._watched, positions, strict=True):
                watched.name(at, storage, holding, last_resort=last_resort)

    def read(self, folder: Path) -> MemoryAccount | None:
        """End a recorded step and write its account; recording continues, unless it failed."""
        self._mark("between")  # names the blocks that the step allocated last
        self.between(last=False)
        self._mark("between")
        return self._written(folder, None)

    def write_account(self, folder: Path, resides: ResidentMemory | None = None) -> str:
        """Write the account into the run folder, once; return the reason why there is none, or an empty string."""
        self._written(folder, resides)
        self._watched.clear()  # millions of events would slow down garbage collection while steps are timed
        return self.lost

    def _written(self, folder: Path, resides: ResidentMemory | None) -> MemoryAccount | None:
        if self.lost:
            return None
        try:
            account = self.account().residing(resides)
        except Exception as e:  # an error in an account must not end the training
            self.lose(e)
            return None
        account.write(folder)
        return account

    def forget(self) -> None:
        """Drop marks and names of events that the sources have folded."""
        self._marks = 0
        self._steps.clear()
        for watched in self._watched:
            watched.forget()

    def account(self) -> MemoryAccount:
        """Return the account of the first memory, with communication; for CUDA, with that of the host's memory."""
        first, *others = (watched.account(self._world, self._steps) for watched in self._watched)
        host = others[0] if others else None
        first = first.model_copy(update={**self._sent(), "notes": (*first.notes, *self._notes), "host": host})
        if self._pinned is None or not self._steps:
            return first
        low, high = next(((low, high) for how, low, high in self._steps if how == "placed"), self._steps[-1][1:])
        pinned = (*self._pinned.phases(0, self._steps[0][1]), *self._pinned.phases(low, high))
        return first.model_copy(update={"pinned": pinned})


def choose_event_sources(device: torch.device) -> list[EventSource]:
    """Return the sources of events that work in this process; the memory of the training device comes first."""
    host: list[EventSource] = [MallocMeter()] if MallocMeter.here() else []
    if device.type != "cpu":
        return [AllocatorHistory(device), *host]
    return host or [ProfilerSource()]


RecordedStep = tuple[RecordingPass, int, int]
"""A recorded step: its pass, the index of its first mark and the index after its last one."""


class _RecordedMemory:
    """One memory: its source of events, and the names of its blocks."""

    def __init__(self, source: EventSource) -> None:
        self.source = source
        self._named: list[NamedStorage] = []
        self._saved: set[int] = set()
        self._saved_at: tuple[int, int] | None = None
        """Events at which the first forward of the pass "saved" begins and ends."""

        self._forward = 0

    def meets(self, phase: str) -> None:
        """Note that a phase begins, in the pass in which autograd reports saved tensors."""
        if self._saved_at is None:
            if phase == "forward":
                self._forward = self.source.at()
            elif phase == "backward":
                self._saved_at = self._forward, self.source.at()

    def save(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that autograd saved in the first forward of that pass."""
        if self._saved_at is None and storage.device.type == self.source.device:
            self._saved.add(storage.data_ptr())

    def name(self, at: int, storage: torch.UntypedStorage, holding: Holding, *, last_resort: bool = False) -> None:
        """Note the name and category of a storage at position `at` of the source."""
        if storage.device.type == self.source.device and (size := storage.nbytes()):
            address = storage.data_ptr()
            self._named.append(NamedStorage(at, address, size, holding.category, holding.name, last_resort))

    def forget(self) -> None:
        self._named.clear()

    def account(self, world: RecordedWorld, steps: Sequence[RecordedStep]) -> MemoryAccount:
        """Return the account of this memory."""
        source, events = self.source, self.source.collect_events()
        events.shared = world.size > 1 and world.device.type == source.device
        events.named = [replace(named, at=source.index(named.at)) for named in self._named]
        attribution = Attribution(events)
        saved = None
        if self._saved_at is not None:
            low, high = self._saved_at
            saved = attribution.saved(source.index(low), source.index(high), self._saved)
        passes = [(how, attribution.windows[low:high]) for how, low, high in steps]
        first = steps[0][1] if steps else attribution.built
        last = passes[-1][1] if passes else attribution.windows[first:]
        shown = next((windows for how, windows in passes if how == "placed"), last)
        seconds = plain_step_seconds(shown, [windows for how, windows in passes if how == "plain"])
        peaks = [max(window.peak for window in windows) for how, windows in passes if how in ("plain", "placed")]
        return MemoryAccount(
            rank=world.rank,
            method=source.method,
            device=source.device,
            base=events.base,
            phases=tuple(attribution.phases(attribution.windows[:first], shown)),
            peaks=tuple(peak - events.base for peak in peaks),
            curve=tuple(attribution.curve(shown, seconds)),
            marks=tuple(attribution.marked(shown, seconds)),
            saved=saved,
            on=source.on,
            notes=(*source.notes, *(() if saved is not None else ("activations are identified by lifetime only",))),
        )


def run_toy_step(world: World) -> None:
    """Run a small step, so that memory which libraries allocate on first use is not counted as the model's."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, wanted = torch.ones(2, 64, device=world.device), torch.zeros(2, dtype=torch.long, device=world.device)
    for _ in range(2):
        nn.functional.cross_entropy(model(batch @ batch.T @ batch), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    world.sum(torch.ones(4096, device=world.device))


def _identity(tensor: Tensor) -> Tensor:
    return tensor
