"""A run whose memory is watched: phases, names and places are written down beside what sources of events see."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Concatenate, ParamSpec, final

import torch
from torch import Tensor, nn

from unipar.backend import Backend, Engine, Holding
from unipar.distributed.world import World
from unipar.memory.account import MemoryAccount, RecordingPass, ResidentMemory
from unipar.memory.recording.attribution import Attribution, plain_step_seconds
from unipar.memory.recording.collectives import TRAFFIC_METHOD, CollectiveCounter
from unipar.memory.recording.holdings import find_storages
from unipar.memory.sources.cuda import CudaHistory
from unipar.memory.sources.events import NamedStorage
from unipar.memory.sources.malloc import MallocMeter
from unipar.memory.sources.pinned import PinnedMemory
from unipar.memory.sources.profiler import ProfilerSource
from unipar.memory.sources.source import EventSource
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.utils.procfs import anonymous_memory

MethodArguments = ParamSpec("MethodArguments")


def _stop_on_error(
    act: Callable[Concatenate[MemoryRecorder, MethodArguments], None],
) -> Callable[Concatenate[MemoryRecorder, MethodArguments], None]:
    """What breaks in watching ends that, and not the training that is watched."""

    @wraps(act)
    def acts(self: MemoryRecorder, *args: MethodArguments.args, **kwargs: MethodArguments.kwargs) -> None:
        if self.lost:
            return
        try:
            act(self, *args, **kwargs)
        except Exception as e:  # whatever a source does not bear
            self.lose(e)

    return acts


@final
class MemoryRecorder:
    """From the base mark to the last watched step, in one memory or several: each has its source."""

    def __init__(self, backend: Backend, sources: Sequence[EventSource]) -> None:
        self._backend = backend
        self._watched = [_RecordedMemory(source) for source in sources]
        self._pinned = PinnedMemory() if any(source.device == "cuda" for source in sources) else None
        self._marks = 0
        self.ended = False
        """Whether nothing is counted any more."""

        self.lost = ""
        """Why it ended before its time."""

        self._notes: list[str] = []
        self._steps: list[RecordedStep] = []
        self._sent: Counter[str] = Counter()
        self._around: ExitStack | None = None
        self._holdings: Callable[[], Iterable[Holding]] = tuple

    def begin(self, world: World, heart: HeartbeatWriter) -> None:
        """The base mark: the world has met, and nothing is built."""
        self._world, self._heart = world, heart
        run_toy_step(world)
        self._anonymous = anonymous_memory()
        self._begin()

    @_stop_on_error
    def _begin(self) -> None:
        for watched in self._watched:
            watched.source.begin()
        self._anonymous = anonymous_memory()
        self._mark("start")
        self._heart.on_phase = self._mark

    def lose(self, error: Exception) -> None:
        """Nothing is seen any more, nor known of what was."""
        said = str(error).strip()
        self.lost = f"{type(error).__name__}: {said.splitlines()[0] if said else 'without a word'}"[:300]
        self._heart.on_phase = None
        self.ended = True
        around, self._around = self._around, None
        with suppress(Exception):
            if around is not None:
                around.close()
        for watched in self._watched:
            with suppress(Exception):
                watched.source.end()

    @_stop_on_error
    def follow(self, engines: Iterable[Engine]) -> None:
        """Whose holdings are asked for: all is built."""
        held = list(engines)
        self._holdings = lambda: chain.from_iterable(engine.holdings() for engine in held)
        self._name()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Around the making of the data: it is no part of what trains."""
        self._mark("data")
        yield
        self._mark("start")

    @property
    def resident(self) -> int:
        """What the system counted at the base, and the sources' own notes."""
        return self._anonymous + sum(watched.source.bytes for watched in self._watched)

    @property
    def on(self) -> bool:
        """Whether a step is watched just now."""
        return self._around is not None

    @_stop_on_error
    def before(self, how: RecordingPass) -> None:
        """A step that is watched begins."""
        self._steps.append((how, self._marks, 0))
        self._around = ExitStack()
        if how == "placed":
            for watched in self._watched:
                self._around.enter_context(watched.source.places(self._backend.capabilities.sites))
        elif how == "saved":
            self._around.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _identity))
        elif how == "sent" and self._world.size > 1:
            self._around.enter_context(self._sending())

    @_stop_on_error
    def between(self, *, last: bool, error: BaseException | None = None) -> None:
        """It is over; after the last one nothing is counted any more."""
        assert self._around is not None
        if error is None:
            self._around.close()
        else:  # what closes a step that failed must not wait for other ranks
            self._around.__exit__(type(error), error, error.__traceback__)
        self._around = None
        how, low, _ = self._steps[-1]
        self._steps[-1] = how, low, self._marks
        if last:
            self._end()

    def _end(self) -> None:
        self._mark("end")
        self._heart.on_phase = None
        self.ended = True
        for watched in self._watched:
            watched.source.end()

    @_stop_on_error
    def end_after_error(self, error: BaseException) -> None:
        """Something failed: what was seen until now is all there is."""
        self._name()
        if self.on:
            self.between(last=True, error=error)
        else:
            self._end()

    @_stop_on_error
    def _mark(self, phase: str) -> None:
        """A phase begins."""
        self._marks += 1
        saving = self.on and self._steps[-1][0] == "saved"
        for watched in self._watched:
            watched.source.mark(phase)
            if saving:
                watched.meets(phase)
        if self._pinned is not None:
            try:
                self._pinned.mark(phase)
            except Exception as e:  # the device's own account is worth more
                self._pinned = None
                self._notes.append(f"what CUDA pins of the host's memory is not known: {type(e).__name__}: {e}")
        if self.on:
            self._name()

    @property
    def _recorded(self) -> bool:
        """Whether the library was told to record what it sends itself."""
        told = self._backend.capabilities.recording
        return bool(told) and told.items() <= os.environ.items()

    @contextmanager
    def _sending(self) -> Generator[None]:
        with (
            self._backend.sends(self._world) if self._recorded else nullcontext({}) as apart,
            CollectiveCounter(self._sent),
        ):
            yield
        self._sent.update(apart)

    @property
    def _sent_by(self) -> str:
        if not any(how == "sent" for how, _, _ in self._steps):
            return ""
        return f"{TRAFFIC_METHOD}, and {self._backend.capabilities.records}" if self._recorded else TRAFFIC_METHOD

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
            for storage in find_storages(holding.tensor):
                if self._pinned is not None and storage.device.type == "cpu" and storage.is_pinned():
                    self._pinned.name(storage, holding)
                    continue
                for watched, at in zip(self._watched, now, strict=True):
                    watched.name(at, storage, holding)

    def read(self, folder: Path) -> MemoryAccount | None:
        """A plain step is over, and its account is written down; watching goes on, unless it is lost."""
        self._mark("between")  # what came last has its name by now
        self.between(last=False)
        self._mark("between")
        return self._written(folder, None)

    def write_account(self, folder: Path, resides: ResidentMemory | None = None) -> str:
        """Its account, into the run's folder, once; or why there is none."""
        self._written(folder, resides)
        self._watched.clear()  # many events, which a collector would go through while steps are timed
        return self.lost

    def _written(self, folder: Path, resides: ResidentMemory | None) -> MemoryAccount | None:
        if self.lost:
            return None
        try:
            account = self.account().residing(resides)
        except Exception as e:  # as above
            self.lose(e)
            return None
        account.write(folder)
        return account

    def forget(self) -> None:
        """What sources have folded has no names and no marks any more."""
        self._marks = 0
        self._steps.clear()
        for watched in self._watched:
            watched.forget()

    def account(self) -> MemoryAccount:
        """What was seen, named: of the first memory, with what was sent; another is the host's beside it."""
        first, *beside = (watched.account(self._world, self._steps) for watched in self._watched)
        told = {"sent": dict(self._sent), "sent_by": self._sent_by, "notes": (*first.notes, *self._notes)}
        first = first.model_copy(update=told)
        if self._pinned is None or not self._steps:
            return first
        low, high = next(((low, high) for how, low, high in self._steps if how == "placed"), self._steps[-1][1:])
        pinned = (*self._pinned.phases(0, self._steps[0][1]), *self._pinned.phases(low, high))
        return first.model_copy(update={"pinned": pinned, "host": beside[0] if beside else None})


def choose_event_sources(device: torch.device) -> list[EventSource]:
    """What can be seen in this process: the memory of the device that trains comes first."""
    if device.type == "cuda":
        return [CudaHistory(), MallocMeter()] if MallocMeter.here() else [CudaHistory()]
    return [MallocMeter() if MallocMeter.here() else ProfilerSource()]


RecordedStep = tuple[RecordingPass, int, int]
"""How it was watched; its marks, from and to."""


class _RecordedMemory:
    """One memory: its source, and what is known of its blocks beside that."""

    def __init__(self, source: EventSource) -> None:
        self.source = source
        self._named: list[NamedStorage] = []
        self._saved: set[int] = set()
        self._saved_at: tuple[int, int] | None = None
        """Where the first forward of that pass begins and ends."""

        self._forward = 0

    def meets(self, phase: str) -> None:
        """In the pass in which autograd says what it saves."""
        if self._saved_at is None:
            if phase == "forward":
                self._forward = self.source.at()
            elif phase == "backward":
                self._saved_at = self._forward, self.source.at()

    def save(self, storage: torch.UntypedStorage) -> None:
        if self._saved_at is None and storage.device.type == self.source.device:
            self._saved.add(storage.data_ptr())

    def name(self, at: int, storage: torch.UntypedStorage, holding: Holding) -> None:
        if storage.device.type == self.source.device and (size := storage.nbytes()):
            self._named.append(NamedStorage(at, storage.data_ptr(), size, holding.category, holding.name))

    def forget(self) -> None:
        self._named.clear()

    def account(self, world: World, steps: Sequence[RecordedStep]) -> MemoryAccount:
        source, seen = self.source, self.source.collect_events()
        seen.shared = world.size > 1 and world.device.type == source.device
        seen.named = [NamedStorage(source.index(n.at), n.address, n.size, n.category, n.name) for n in self._named]
        replay = Attribution(seen)
        saved = None
        if self._saved_at is not None:
            low, high = self._saved_at
            saved = replay.saved(source.index(low), source.index(high), self._saved)
        passes = [(how, replay.windows[low:high]) for how, low, high in steps]
        first = steps[0][1] if steps else replay.built
        last = passes[-1][1] if passes else replay.windows[first:]
        shown = next((windows for how, windows in passes if how == "placed"), last)
        seconds = plain_step_seconds(shown, [windows for how, windows in passes if how == "plain"])
        peaks = [max(window.peak for window in windows) for how, windows in passes if how in ("plain", "placed")]
        return MemoryAccount(
            rank=world.rank,
            method=source.method,
            device=source.device,
            base=seen.base,
            phases=tuple(replay.phases(replay.windows[:first], shown)),
            peaks=tuple(peak - seen.base for peak in peaks),
            curve=tuple(replay.curve(shown, seconds)),
            marks=tuple(replay.marked(shown, seconds)),
            saved=saved,
            on=source.on,
            notes=(*source.notes, *(() if saved is not None else ("activations are told by lifetime alone",))),
        )


def run_toy_step(world: World) -> None:
    """A toy step: what libraries make on first use is not the model's."""
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
