"""A run whose memory is watched: phases, names and places are written down beside what the meter notes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import currentframe
from itertools import chain
from pathlib import Path
from threading import get_native_id
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from unipar.backend import Backend, Category, Engine, Holding
from unipar.beat import Heart
from unipar.memory.account import PHASES, Account, Pass
from unipar.memory.counting import MOST, Meter, code
from unipar.memory.replay import Mark, Named, Replay, Seen, Site, askers
from unipar.memory.resident import anonymous
from unipar.memory.sent import METHOD, Sent
from unipar.world import World


@final
class Watching:
    """From the base mark to the last watched step."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._marks: list[Mark] = []
        self._named: list[Named] = []
        self._placed: list[Site] = []
        self._steps: list[tuple[Pass, int, int]] = []
        """How each was watched; its marks, from and to."""

        self._saved: set[int] = set()
        self._saved_at: tuple[int, int] | None = None
        """Where the first forward of that pass begins and ends."""

        self._sent: Counter[str] = Counter()
        self._forward = 0
        self._around: AbstractContextManager[Any] | None = None
        self._holdings: Callable[[], Iterable[Holding]] = tuple

    def begin(self, world: World, heart: Heart) -> None:
        """The base mark: the world has met, and nothing is built."""
        self._world, self._heart = world, heart
        warm(world)
        self._meter = Meter()
        self._small = self._meter.small()
        self._base = self._meter.begin()
        self._anonymous = anonymous()

        self._mark("start")
        heart.heed = self._mark

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
        """What the system counted at the base, and the meter's own notes."""
        return self._anonymous + self._meter.bytes

    @property
    def on(self) -> bool:
        """Whether a step is watched just now."""
        return self._around is not None

    def before(self, how: Pass) -> None:
        """A step that is watched begins."""
        self._steps.append((how, len(self._marks), 0))
        self._around = nullcontext()
        if how == "placed":
            self._around = _Places(self._meter, self._placed, self._backend.capabilities.sites)
        elif how == "saved":
            self._around = torch.autograd.graph.saved_tensors_hooks(self._save, _same)
        elif how == "sent" and self._world.size > 1:
            self._around = self._sending()
        self._around.__enter__()

    def between(self, *, last: bool) -> None:
        """It is over; after the last one nothing is counted any more."""
        assert self._around is not None
        self._around.__exit__(None, None, None)
        self._around = None
        how, low, _ = self._steps[-1]
        self._steps[-1] = how, low, len(self._marks)
        if last:
            self._mark("end")
            self._heart.heed = None
            self._meter.end()

    def _mark(self, phase: str) -> None:
        """A phase begins."""
        meter = self._meter
        self._marks.append(Mark(meter.at(), phase, meter.peak(), meter.live(), meter.small()))
        if self.on:
            if self._steps[-1][0] == "saved" and self._saved_at is None:
                if phase == "forward":
                    self._forward = meter.at()
                elif phase == "backward":
                    self._saved_at = self._forward, meter.at()
            self._name()

    @property
    def _recorded(self) -> bool:
        """Whether the library was told to record what it sends itself."""
        told = self._backend.capabilities.recording
        return bool(told) and told.items() <= os.environ.items()

    @contextmanager
    def _sending(self) -> Generator[None]:
        with self._backend.sends(self._world) if self._recorded else nullcontext({}) as apart, Sent(self._sent):
            yield
        self._sent.update(apart)

    @property
    def _sent_by(self) -> str:
        if not any(how == "sent" for how, _, _ in self._steps):
            return ""
        return f"{METHOD}, and {self._backend.capabilities.records}" if self._recorded else METHOD

    def _save(self, tensor: Tensor) -> Tensor:
        if self._saved_at is None:
            self._saved.update(storage.data_ptr() for storage in _storages(tensor))
        return tensor

    def _name(self) -> None:
        at = self._meter.at()
        for holding in self._holdings():
            for storage in _storages(holding.tensor):
                if size := storage.nbytes():
                    self._named.append(Named(at, storage.data_ptr(), size, holding.category, holding.name))

    def account(self) -> Account:
        """What was seen, named."""
        events = self._meter.events()
        kinds, owners = askers(events["caller"].tolist(), code())
        seen = Seen(
            events=events,
            kinds=kinds,
            owners=owners,
            base=self._base,
            base_small=self._small,
            thread=get_native_id(),
            shared=self._world.size > 1,
            marks=self._marks,
            named=self._named,
            sites=self._placed,
        )
        replay = Replay(seen)
        saved = replay.saved(*self._saved_at, self._saved) if self._saved_at is not None else None
        steps = [(how, replay.windows[low:high]) for how, low, high in self._steps]
        shown = next(windows for how, windows in steps if how == "placed")
        before = replay.windows[: self._steps[0][1]]
        phases = tuple(replay.phase(name, before if name == "built" else shown) for name in PHASES)
        notes = [] if saved is not None else ["activations are told by lifetime alone"]
        if len(events) == MOST:
            notes.append(f"only the first {MOST} blocks were noted")
        peaks = [max(window.peak for window in windows) for how, windows in steps if how in ("plain", "placed")]
        return Account(
            rank=self._world.rank,
            method=self._meter.method,
            device="cpu",
            base=self._base,
            phases=phases,
            peaks=tuple(peak - self._base for peak in peaks),
            curve=tuple(replay.curve(shown)),
            marks=tuple(replay.marked(shown)),
            saved=saved,
            sent=dict(self._sent),
            sent_by=self._sent_by,
            notes=tuple(notes),
        )


def warm(world: World) -> None:
    """A toy step: what libraries make on first use is not the model's."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, wanted = torch.ones(2, 64, device=world.device), torch.zeros(2, dtype=torch.long, device=world.device)
    for _ in range(2):
        nn.functional.cross_entropy(model(batch), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    world.sum(torch.ones(4096, device=world.device))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()


_INSIDE: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class _Places(TorchDispatchMode):
    """Which line asked for an operation that allocated something."""

    def __init__(self, meter: Meter, found: list[Site], sites: Mapping[str, Category]) -> None:
        super().__init__()
        self._meter, self._found, self._sites = meter, found, sites

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        low = self._meter.at()
        out = func(*args, **(kwargs or {}))
        high = self._meter.at()
        if high > low and (not self._found or self._found[-1].high <= low):
            self._found.append(Site(low, high, *self._place(currentframe(), str(func))))
        return out

    def _place(self, frame: FrameType | None, operation: str) -> tuple[str, Category | None]:
        nearest = ""
        while frame is not None:
            spelled = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
            for site, category in self._sites.items():
                if spelled.endswith(site):
                    return f"{operation} in {frame.f_code.co_name}", category
            if not nearest and not spelled.startswith(_INSIDE):
                nearest = f"{operation} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return nearest or operation, None
