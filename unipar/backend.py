"""What a backend is: the contract.

A `Backend` is a description: it can be asked what it supports before any process starts. An `Engine`
is one live model in one process. Data, rates, stopping and reports belong to the loop, which is the
same under every backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, final

from typing_extensions import override

from unipar.config import Precision, Section, Shard
from unipar.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from unipar.config import Config
    from unipar.foreign import Reading
    from unipar.place import Launcher, Place
    from unipar.script import Outline, Script
    from unipar.world import World

Fn = Callable[["nn.Module", Any], Any]
"""A task's loss or metrics: `fn(model, batch)`."""

Mark = Callable[[str], None]
"""Tells the run which phase an engine is in."""


Category = Literal[
    "parameters",
    "masters",
    "gradients",
    "optimizer",
    "communication",
    "buffers",
    "activations",
    "temporaries",
    "library",
    "runtime",
    "unattributed",
]
"""What memory is for. Engines name the first six; the rest is told by who allocated it and how long it lived."""


class NoOptions(Section):
    """For a backend that has no options of its own."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A cell's other way of doing the same: the options that make it."""

    options: Mapping[str, object]
    shards: tuple[Shard, ...]
    says: str
    alone: bool = False
    """One process, whatever the config says about ranks."""

    library_defaults: bool = False
    """Sizes in it are the library's own defaults: a page of a comparison says what they cost."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do, as data: printed by `unipar backends`, enforced by `check`."""

    shards: tuple[Shard, ...]
    variants: Mapping[str, Variant] = field(default_factory=dict[str, Variant])
    devices: tuple[str, ...] = ("cpu", "cuda")
    alone: bool = False
    """One process, whatever the config says about ranks."""

    gaps: Mapping[tuple[Shard | None, Precision], str] = field(default_factory=dict[Any, str])
    """What it cannot do: a shard (None: all) in a precision, each with its sentence."""

    also: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict[str, Any])
    """Keys of the config that not every backend obeys, and for which shards this one does."""

    launchers: tuple[Launcher, ...] = ()
    """The launchers that come with its library."""

    waits: tuple[str, ...] = ()
    """Parts of file names that a rank's stack shows while it waits in a collective."""

    sites: Mapping[str, Category] = field(default_factory=dict[str, Any])
    """Where its library allocates what lives too short to be held: the end of `path:function`, and what it is for."""

    records: str = ""
    """What `Backend.sends` reads, in words."""

    recording: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables without which its library does not record that. Those are set in a world of its own, where nothing is
    timed."""


@dataclass(frozen=True)
class Dtypes:
    """What each thing is kept or done in; `explain` prints it."""

    parameter: str
    master: str
    gradient: str
    reduction: str
    compute: str


class Backend(ABC):
    """Subclass it, make one instance, and name that in the entry-point group `unipar.backends`."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that must be importable."""

    hint: ClassVar[str] = ""
    """What to type when they are not."""

    capabilities: ClassVar[Capabilities]
    options: ClassVar[type[Section]] = NoOptions
    exports: ClassVar[str] = ""
    """What `unipar export --to` calls a script for it, which script.py writes; empty: there is none."""

    imports: ClassVar[str] = ""
    """What `unipar import` calls its library's own config, which foreign.py reads; empty: it is not read."""

    def refuse(self, config: Config) -> Iterator[str]:
        """Each reason, beyond `capabilities`, why `config` cannot run here."""
        yield from ()

    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        """What the library will really be told; rules instead of numbers while `parameters` is unknown."""
        return {}

    @abstractmethod
    def dtypes(self, config: Config) -> Dtypes: ...

    def host(self, config: Config, size: int) -> AbstractContextManager[Mapping[str, str]]:
        """The parent's side: start what must listen, on loopback; yield variables for every worker."""
        return nullcontext({})

    def version(self) -> str:
        """Import the library and say which it is; asked in a process of its own, which a broken one may end."""
        modules = [import_module(name) for name in self.requires or ("torch",)]
        return ", ".join(f"{module.__name__} {getattr(module, '__version__', '')}".strip() for module in modules)

    def install(self, *, force: bool = False) -> str:
        """Make and install what `pip install` alone cannot, anew with `force`; say what was done."""
        raise Unsupported(self.name, [f"there is nothing to build: {self.hint or 'it comes with unipar'}"])

    def script(self, outline: Outline) -> Script:
        """The same training without unipar, the files of a folder and the command: `script` in script.py beside it."""
        if not self.exports:
            way = "`unipar export --help` names those that have one"
            raise Unsupported(self.name, [f"there is no script for it; {way}"])
        return self._beside("script").script(outline)

    def foreign_keys(self) -> frozenset[str]:
        """Keys at the top of that config, which tell whose a file is: `KNOWN` in foreign.py beside it."""
        return self._beside("foreign").KNOWN if self.imports else frozenset()

    def read_foreign(self, reading: Reading, data: Mapping[str, Any]) -> None:
        """Carry that config key by key, by `read` in foreign.py; what is wrong with it is noted, not raised."""
        if not self.imports:
            raise Unsupported(self.name, ["it has no config of its own that could be read"])
        self._beside("foreign").read(reading, data)

    @final
    def _beside(self, name: str) -> Any:
        """A file in the description's package, loaded when it is needed."""
        return import_module(f"{type(self).__module__}.{name}")

    @abstractmethod
    def join(self, config: Config, place: Place) -> World:
        """Meet the other processes; assert that the library sees the same world."""

    def sends(self, world: World) -> AbstractContextManager[Mapping[str, int]]:
        """Around one step: payload bytes by collective of what its library sends without torch.distributed.

        They are there once it is closed. All ranks open and close it together, where `recording` is set.
        """
        return nullcontext({})

    @abstractmethod
    def build(self, part: Part, config: Config, world: World) -> Engine:
        """Split the part's model over `world`, with its optimizer."""


@dataclass(frozen=True)
class Micro:
    """One microbatch, and its weight over the global batch's; scale 0 is a real sample that does not count."""

    batch: Any
    scale: float


@dataclass(frozen=True)
class Part:
    """A model to be trained: real on rank 0, on meta elsewhere."""

    name: str
    module: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    """Called when the parameters are where they stay."""

    blocks: Sequence[str]
    """Names of the repeated blocks."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step gave, still on the device."""

    loss: Tensor
    """This rank's share: the sum over ranks is the loss of the global batch."""

    norm: Tensor
    """Of all gradients, before clipping, equal on all ranks."""

    skipped: bool = False
    """Weights were left alone because of an overflow: fp16 lowers its loss scale; elsewhere it is an error."""


@dataclass(frozen=True)
class Piece:
    """Part of one tensor of the state, held by this rank."""

    name: str
    kind: str
    """weight, buffer, or the optimizer's own key."""

    shape: tuple[int, ...]
    where: tuple[int, int]
    """A range of the whole tensor in row-major order."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor that an engine keeps, and what for; a storage that several share counts once."""

    category: Category
    name: str
    tensor: Tensor


class Read(Protocol):
    """Gives state back, a range at a time."""

    def __call__(self, name: str, kind: str, where: tuple[int, int]) -> Tensor: ...

    def kinds(self, name: str) -> set[str]:
        """weight and the optimizer's keys that are known for a parameter."""
        ...


class Engine(ABC):
    """One live model in one process. Every method is called by all ranks together."""

    @abstractmethod
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        """Forward and backward over all microbatches, clip, update at each group's rate times `factor`."""

    @abstractmethod
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        """Forward only, through the same wrapper."""

    @abstractmethod
    def call_frozen(self, fn: Fn, given: Any) -> Any:
        """Return `fn(model, given)` inside another part's loss, while this part's parameters take no gradients.

        Gradients flow through it to `given`; each module is in its own mode.
        """

    def before_state_access(self) -> None:  # noqa: B027 - a neutral hook
        """Put parameters where they stay between steps: called before state is read or `requires_grad` changes."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """State out: what this rank holds, without a collective."""

    @abstractmethod
    def restore(self, read: Read) -> None:
        """State in: asks for what this rank holds."""

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """All tensors that this rank keeps just now, without a collective and without changing anything.

        Asked where phases meet, too: between forward and backward, backward and update.
        """

    def learning_rates(self) -> list[float]:
        """Return each group's rate as the optimizer itself holds it; empty if the library does not tell."""
        return []

    def take_mean(self) -> None:  # noqa: B027 - a neutral hook
        """Ranks that stepped by themselves take the mean of their states: `train.sync_every`."""

    def close(self) -> None:  # noqa: B027 - a neutral hook
        """Release what `build` took."""


class Around(Engine):
    """An engine around another that does all the work: override what shall be different."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @override
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        return self.inner.step(fn, micros, factor, mark)

    @override
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        return self.inner.evaluate(fn, batch)

    @override
    def call_frozen(self, fn: Fn, given: Any) -> Any:
        return self.inner.call_frozen(fn, given)

    @override
    def before_state_access(self) -> None:
        self.inner.before_state_access()

    @override
    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()

    @override
    def restore(self, read: Read) -> None:
        self.inner.restore(read)

    @override
    def holdings(self) -> Iterator[Holding]:
        return self.inner.holdings()

    @override
    def learning_rates(self) -> list[float]:
        return self.inner.learning_rates()

    @override
    def take_mean(self) -> None:
        self.inner.take_mean()

    @override
    def close(self) -> None:
        self.inner.close()
