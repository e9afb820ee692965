"""`Backend`, `Capabilities`, `Variant`: description of a backend, available before any process starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from unipar.backend.engine import Category, Engine, Part
from unipar.backend.precision import Dtypes
from unipar.config import Precision, Section, Shard
from unipar.errors import Unsupported
from unipar.prediction.terms import not_planned_yet

if TYPE_CHECKING:
    from unipar.backend.export import Outline, Script
    from unipar.backend.foreign import ForeignConfigReader
    from unipar.backend.observed_library import ObservedLibrary
    from unipar.config import Config
    from unipar.distributed.launchers import Launcher
    from unipar.distributed.place import Place
    from unipar.distributed.world import World
    from unipar.prediction.rank_part import RankPart
    from unipar.prediction.timeline import OverlapWindow, Prediction, StepTimeline


class NoOptions(Section):
    """Empty section for a backend without options."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Second way of running a strategy, selected by options of the backend."""

    options: Mapping[str, object]
    shards: tuple[Shard, ...]
    says: str
    alone: bool = False
    """True if it is one process, whatever the config says about ranks."""

    library_defaults: bool = False
    """True if the variant uses the library's default sizes: the page of a comparison shows what they cost."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Abilities of a backend, as data: printed by `unipar backends`, enforced by `check`."""

    shards: tuple[Shard, ...]
    short_names: Mapping[str, Shard] = field(default_factory=dict[str, Any])
    """Names that PyTorch's users have for strategies, and that are taken for them: fsdp2 for native/parameters."""

    variants: Mapping[str, Variant] = field(default_factory=dict[str, Variant])
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Device types for which its library has code."""

    tried: Mapping[str, str] = field(default_factory=lambda: {"cpu": ""})
    """Device types on which the backend has run, each with how: "" in reality, else a word such as "emulated"."""

    alone: bool = False
    """True if it is one process, whatever the config says about ranks."""

    axes: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict[str, Any])
    """Axes of the mesh that it has beside the data's (`tensor`), each with the shards for which it has it."""

    axes_lacked: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons why it does not have the other axes, by axis, each as a clause."""

    gaps: Mapping[tuple[Shard | None, Precision], str] = field(default_factory=dict[Any, str])
    """Unsupported pairs of shard (None: every shard) and precision, each with the reason as a sentence."""

    also: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict[str, Any])
    """Config keys that not every backend supports, each with the shards for which this one does."""

    launchers: tuple[Launcher, ...] = ()
    """Launchers that come with the backend's library."""

    waits: tuple[str, ...] = ()
    """Parts of file names that appear in a rank's stack while it waits in a collective."""

    sites: Mapping[str, Category] = field(default_factory=dict[str, Any])
    """Functions of its library that allocate tensors which `holdings` cannot list: end of `path:function` -> use."""

    records: str = ""
    """Source of the numbers of `Backend.sends`, in words."""

    recording: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that make the library record them, set only in a separate world where nothing is timed."""


class Backend(ABC):
    """Base class of a backend's description.

    Subclass it, make one instance, and name the instance in the entry-point group `unipar.backends`.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    """Modules that must be importable."""

    hint: ClassVar[str] = ""
    """Command to type if they are not importable."""

    capabilities: ClassVar[Capabilities]
    options: ClassVar[type[Section]] = NoOptions
    exports: ClassVar[str] = ""
    """Name for `unipar export --to` of the script that export.py beside the description writes; empty: no script."""

    exported_axes: ClassVar[tuple[str, ...]] = ()
    """Keys of `parallel` beside data and shard that its script carries, such as pipeline."""

    imports: ClassVar[str] = ""
    """Name for `unipar import` of the library's own config, read by import_config.py; empty: not read."""

    launch_variables: ClassVar[str] = ""
    """First letters of the environment variables that `launch_refusals` reads: it is asked if one of them is set."""

    reads_checkpoints: ClassVar[bool] = False
    """Whether import_checkpoint.py beside the description reads checkpoint folders that the library itself wrote."""

    observes: ClassVar[bool] = False
    """Whether observed.py beside the description knows scripts that use the library (`unipar observe`)."""

    def refuse(self, config: Config) -> Iterator[str]:
        """Yield each reason, beyond `capabilities`, why `config` cannot run here."""
        yield from ()

    def used_options(self, config: Config) -> tuple[str, ...]:
        """Return the names of the sections of `options` that the config's strategy uses."""
        return (self.name,)

    def idle_options(self, config: Config) -> Iterator[tuple[str, str]]:
        """Yield each key of `options` that the config sets and that has no effect in its strategy, with the reason.

        Asked of a config that has options.
        """
        yield from ()

    def launch_refusals(self, config: Config) -> Iterator[str]:
        """Yield each setting of the library's own launcher, or variable of the library, that contradicts a config.

        Asked of every installed backend, whichever one trains the config.
        """
        yield from ()

    def fills_from_files(self, config: Config) -> bool:
        """Return whether the engine needs no whole model: rank 0's parameters may still be in a file when it is built.

        It asks `unipar.backend.file_values` for them, as `unipar.engines.placement.broadcast_tensor` does.
        """
        return False

    def library_name(self, config: Config) -> str:
        """Return what users of the library call this way of training, in a word or two: DDP, ZeRO-2; "" if nothing."""
        return ""

    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        """Return the config that the library will be given; rules instead of numbers if `parameters` is unknown."""
        return {}

    def predict(self, config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
        """Return what the fullest of this many ranks on `device` (cpu or cuda) holds and sends in a step.

        Closed forms, without a process; raise Unsupported for a config that they do not cover.
        """
        raise Unsupported(self.name, [not_planned_yet("its memory")])

    def overlaps(self, config: Config) -> Mapping[str, OverlapWindow]:
        """Return the collectives along the data's axis beside which a rank computes, and during which part of a step.

        Only where the device can: on CUDA, and on the CPU as far as its cores are free.
        """
        return {}

    def split_for_plan(self, part: Part, config: Config) -> Sequence[RankPart]:
        """Return what ranks along the axes of `parallel` have of a part, whose model needs no values, for `predict`.

        Ranks that hold and do the same are one of them.
        """
        axes = config.parallel.axes
        raise Unsupported(self.name, [not_planned_yet(f"parallel ({axes})")])

    @abstractmethod
    def dtypes(self, config: Config) -> Dtypes:
        """Return the dtypes that the config's precision means in this backend."""

    def plan_split(self, part: Part, config: Config) -> Iterator[str]:
        """Yield sentences on how tensor and context would split the blocks of a part, whose model needs no values."""
        yield from ()

    def host(self, config: Config, size: int) -> AbstractContextManager[Mapping[str, str]]:
        """Context manager: start servers in the parent, on loopback; yield environment variables for the workers."""
        return nullcontext({})

    def version(self) -> str:
        """Import the library and return its name and version.

        Called in a separate process, because a broken library may end it.
        """
        modules = [import_module(name) for name in self.requires or ("torch",)]
        return ", ".join(f"{module.__name__} {getattr(module, '__version__', '')}".strip() for module in modules)

    def install(self, *, force: bool = False) -> str:
        """Build and install what `pip install` alone cannot, again with `force`; return a sentence on what was done."""
        raise Unsupported(self.name, [f"there is nothing to build: {self.hint or 'it comes with unipar'}"])

    def script(self, outline: Outline) -> Script:
        """Return the same training as a script without unipar, by `script` in export.py beside the description."""
        if not self.exports:
            way = "`unipar export --help` lists the backends that have one"
            raise Unsupported(self.name, [f"this backend has no script; {way}"])
        return self._beside("export").script(outline)

    def foreign_keys(self) -> frozenset[str]:
        """Return the top-level keys of the library's own config, which identify a file: `KNOWN` in import_config.py."""
        return self._beside("import_config").KNOWN if self.imports else frozenset()

    def read_foreign(self, reading: ForeignConfigReader, data: Mapping[str, Any]) -> None:
        """Convert the library's own config by `read` in import_config.py; errors are collected, not raised."""
        if not self.imports:
            raise Unsupported(self.name, ["this backend's library has no config that unipar can read"])
        self._beside("import_config").read(reading, data)

    def recognizes_checkpoint(self, path: Path) -> bool:
        """Return whether a path is a checkpoint folder of the library's own."""
        return self.reads_checkpoints and self._beside("import_checkpoint").recognizes(path)

    def collect_checkpoint(self, path: Path, into: Any, *, weights_only: bool) -> None:
        """Collect the state in such a folder by `collect` in import_checkpoint.py, into a `StateCollector`."""
        self._beside("import_checkpoint").collect(path, into, weights_only=weights_only)

    @property
    def observed_library(self) -> ObservedLibrary | None:
        """Knowledge about scripts that use the library: `LIBRARY` in observed.py beside the description."""
        return self._beside("observed").LIBRARY if self.observes else None

    @final
    def _beside(self, name: str) -> Any:
        """Return a module of the description's package, imported when it is needed."""
        return import_module(f"{type(self).__module__}.{name}")

    @abstractmethod
    def join(self, config: Config, place: Place) -> World:
        """Meet the other processes; assert that the library sees the same world."""

    def sends(self, world: World) -> AbstractContextManager[Mapping[str, int]]:
        """Context manager: count the bytes that the library sends in one step without torch.distributed.

        Yield a mapping of collective -> bytes sent, filled on exit. All ranks enter and leave it together, in a
        world in which the variables of `recording` are set.
        """
        return nullcontext({})

    @abstractmethod
    def build(self, part: Part, config: Config, world: World) -> Engine:
        """Return an engine for the part: its model split over `world`, and its optimizer."""
