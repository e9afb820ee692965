"""`Backend`, `Capabilities`, `Variant`: what a backend says before any process starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, final

from unipar.backend.engine import Category, Engine, Part
from unipar.backend.precision import Dtypes
from unipar.config import Precision, Section, Shard
from unipar.errors import Unsupported

if TYPE_CHECKING:
    from unipar.backend.export import Outline, Script
    from unipar.backend.foreign import ForeignConfigReader
    from unipar.config import Config
    from unipar.distributed.launchers import Launcher
    from unipar.distributed.place import Place
    from unipar.distributed.world import World


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
        """The same training without unipar, the files of a folder and the command: `script` in export.py beside it."""
        if not self.exports:
            way = "`unipar export --help` names those that have one"
            raise Unsupported(self.name, [f"there is no script for it; {way}"])
        return self._beside("export").script(outline)

    def foreign_keys(self) -> frozenset[str]:
        """Keys at the top of that config, which tell whose a file is: `KNOWN` in import_config.py beside it."""
        return self._beside("import_config").KNOWN if self.imports else frozenset()

    def read_foreign(self, reading: ForeignConfigReader, data: Mapping[str, Any]) -> None:
        """Carry that config key by key, by `read` in import_config.py; what is wrong with it is noted, not raised."""
        if not self.imports:
            raise Unsupported(self.name, ["it has no config of its own that could be read"])
        self._beside("import_config").read(reading, data)

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
