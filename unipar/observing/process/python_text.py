"""Values written as Python, and the arguments with which a script's modules were made."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any, Final, final

import torch
from torch import nn

from unipar.results.observed_recipe import CodePlace, SeenObject
from unipar.utils.files import is_library_file

_MOST_VALUES: Final = 64
"""Number of values in a list or a mapping from which it is not written down."""

_LONGEST_TEXT: Final = 500
_DEEPEST: Final = 6
_FARTHEST_INIT: Final = 16
"""Number of frames in which a constructor is looked for above that of nn.Module."""

_NOT_OF_A_CONFIG: Final = ("transformers_version", "model_type", "architectures", "_name_or_path")
"""Keys of a config that say where it comes from."""


@dataclass(frozen=True)
class PythonText:
    """Python that makes a value again."""

    text: str = ""
    """Empty if the value cannot be written."""

    imports: Mapping[str, str] = field(default_factory=dict[str, str])
    """Module of each name in it; "": the name is a module."""

    unknown: tuple[str, ...] = ()
    """Values that cannot be written, each with its class."""


_Lazy = Callable[[], PythonText]
_Arguments = list[tuple[str, _Lazy]]


@final
class MadeModules:
    """Arguments of the constructors of modules, read from the frames of their calls."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[nn.Module], type, CodePlace | None, _Arguments | None]] = {}

    def note(self, module: nn.Module, frame: FrameType | None) -> None:
        """Note how a module is being made; `frame`: that in which its base class is called."""
        kind, key = type(module), id(module)
        call = _constructor_frame(module, frame)
        arguments: _Arguments | None = []
        if call is not None:
            arguments = [(name, self._reduce(value)) for name, value in _arguments(kind, call)]
            frame = call.f_back
        elif kind.__init__ is not nn.Module.__init__:
            arguments = None
        ref = weakref.ref(module, lambda _: self._made.pop(key, None))
        self._made[key] = ref, kind, place_in_script(frame), arguments

    def _reduce(self, value: Any, depth: int = 0) -> _Lazy:
        """Return a function that writes a value, which keeps no module and no tensor alive."""
        if isinstance(value, nn.Module):
            ref = weakref.ref(value)
            return lambda: _gone if (module := ref()) is None else self.python_of(module)
        if isinstance(value, list | tuple) and len(value) <= _MOST_VALUES and depth < _DEEPEST:
            inner = [self._reduce(v, depth + 1) for v in value]
            ends, one = ("[]", "") if isinstance(value, list) else ("()", "," if len(value) == 1 else "")
            return lambda: _joined([write() for write in inner], ends[0], f"{one}{ends[1]}")
        written = python_of(value)
        return lambda: written

    def python_of(self, module: nn.Module) -> PythonText:
        """Return the call that makes a module."""
        known = self._made.get(id(module))
        if known is None or known[0]() is not module:
            return PythonText(unknown=(type(module).__qualname__,))
        _, kind, _, arguments = known
        name = _python_of_name(kind)
        if arguments is None or not name.text:
            return PythonText(unknown=(kind.__qualname__,))
        parts = [(key, write()) for key, write in arguments]
        unknown = [f"{key or 'an argument'}: {', '.join(value.unknown)}" for key, value in parts if not value.text]
        if unknown:
            return PythonText(unknown=tuple(unknown))
        values = [PythonText(f"{key}={v.text}" if key else v.text, v.imports) for key, v in parts]
        return _joined(values, f"{name.text}(", ")", name.imports)

    def describe(self, module: nn.Module) -> SeenObject:
        """Return what is known of a module."""
        known = self._made.get(id(module))
        kind, place = (type(module), None) if known is None or known[0]() is not module else known[1:3]
        return seen_object(kind, self.python_of(module), made=place)


_gone: Final = PythonText(unknown=("a module that is gone",))


def seen_object(kind: Any, written: PythonText, made: CodePlace | None = None, variable: str = "") -> SeenObject:
    """Return what is known of an object of a class, or of a function."""
    modules = {module for module in written.imports.values() if module}
    return SeenObject(
        name=kind.__qualname__,
        module=kind.__module__,
        file=_file_of(kind.__module__),
        expression=written.text,
        imports=dict(written.imports),
        files={module: _file_of(module) for module in sorted(modules)},
        unknown=written.unknown,
        made=made,
        variable=variable,
    )


def _file_of(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "")


def _constructor_frame(module: nn.Module, frame: FrameType | None) -> FrameType | None:
    """Return the frame of the constructor of a module's own class, which has called that of nn.Module."""
    code = getattr(inspect.unwrap(type(module).__init__), "__code__", None)
    for _ in range(_FARTHEST_INIT):
        if frame is None:
            return None
        if frame.f_code is code and frame.f_locals.get(frame.f_code.co_varnames[0]) is module:
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _parameters_of(kind: type) -> list[inspect.Parameter]:
    return list(inspect.signature(inspect.unwrap(kind.__init__)).parameters.values())[1:]


def _arguments(kind: type, frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument that is not its default; "" for those without a name."""
    values = frame.f_locals
    for p in _parameters_of(kind):
        value = values.get(p.name, p.default)
        if p.kind is p.VAR_POSITIONAL:
            yield from (("", v) for v in value)
        elif p.kind is p.VAR_KEYWORD:
            yield from value.items()
        elif not _is_default(value, p.default):
            yield ("" if p.kind is p.POSITIONAL_ONLY else p.name), value


def _is_usual(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Return whether a field of a dataclass has its default, an empty list from a factory too."""
    here = getattr(value, field.name, None)
    if getattr(field.default_factory, "__origin__", field.default_factory) in (list, dict, set):
        return not here
    return _is_default(here, field.default)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, bool | int | float | str | tuple) and value == default
    )


def python_of(value: Any, depth: int = 0) -> PythonText:
    """Return Python that makes a value again."""
    if value is None or type(value) in (bool, int) or (type(value) is str and len(value) <= _LONGEST_TEXT):
        return PythonText(repr(value))
    if type(value) is float:
        return PythonText(repr(value) if math.isfinite(value) else f'float("{value}")')
    if isinstance(value, torch.dtype | torch.device):
        return PythonText(str(value) if isinstance(value, torch.dtype) else f"torch.{value!r}", {"torch": ""})
    if isinstance(value, PurePath):
        return PythonText(f"Path({str(value)!r})", {"Path": "pathlib"})
    if isinstance(value, type | FunctionType):
        return _python_of_name(value)
    if isinstance(value, enum.Enum):
        name = _python_of_name(type(value))
        return PythonText(f"{name.text}.{value.name}", name.imports) if name.text else name
    if depth >= _DEEPEST:
        return PythonText(unknown=(type(value).__qualname__,))
    if type(value) in (list, tuple) and len(value) <= _MOST_VALUES:
        ends = "[]" if type(value) is list else "()"
        last = "," if type(value) is tuple and len(value) == 1 else ""
        return _joined([python_of(v, depth + 1) for v in value], ends[0], f"{last}{ends[1]}")
    if type(value) is dict and len(value) <= _MOST_VALUES:
        pairs = [(python_of(k, depth + 1), python_of(v, depth + 1)) for k, v in value.items()]
        return _joined([_joined([k, v], "", "", between=": ") for k, v in pairs], "{", "}")
    return _python_of_object(value, depth)


def _python_of_object(value: Any, depth: int) -> PythonText:
    """Return the call that makes an object whose arguments can be read from it."""
    kind = type(value)
    name = _python_of_name(kind)
    settings = _settings_of(value)
    if settings is None or not name.text:
        return PythonText(unknown=(kind.__qualname__,))
    written = [(key, python_of(v, depth + 1)) for key, v in settings.items()]
    values = [PythonText(f"{key}={v.text}" if v.text else "", v.imports, v.unknown) for key, v in written]
    return _joined(values, f"{name.text}(", ")", name.imports)


def _settings_of(value: Any) -> Mapping[str, Any] | None:
    """Return the keyword arguments that make an object again, or None if they are not known."""
    if isinstance(value, type):
        return None
    changed = getattr(value, "to_diff_dict", None)  # a config that tells what differs from its defaults
    if callable(changed):
        told: Any = changed()
        usual = {p.name: p.default for p in inspect.signature(type(value)).parameters.values()}
        kept = {k: v for k, v in told.items() if k not in _NOT_OF_A_CONFIG} if isinstance(told, dict) else None
        return kept and {k: v for k, v in kept.items() if k not in usual or not _is_default(v, usual[k])}
    if type(value) in (Namespace, SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value):
        return {
            f.name: getattr(value, f.name, None)
            for f in dataclasses.fields(value)
            if f.init and not _is_usual(value, f)
        }
    own = type(value).__init__ is not object.__init__ or bool(getattr(value, "__dict__", None))
    return None if own or type(value).__new__ is not object.__new__ else {}


def _python_of_name(thing: Any) -> PythonText:
    """Return the name of a class or a function as code in another file has it; no text if it is not importable."""
    name, module = str(thing.__qualname__), str(thing.__module__)
    if "<" in name:
        return PythonText(unknown=(f"{name.rpartition('.')[2]}, which is defined in a function",))
    if module == "builtins":
        return PythonText(name)
    if module.startswith("torch.nn.modules.") and getattr(nn, name, None) is thing:
        return PythonText(f"nn.{name}", {"nn": "torch"})
    top = name.partition(".")[0]
    if not hasattr(sys.modules.get(module), top):
        return PythonText(unknown=(name,))
    return PythonText(name, {top: module})


def _joined(
    parts: Iterable[PythonText],
    begin: str,
    end: str,
    imports: Mapping[str, str] | None = None,
    between: str = ", ",
) -> PythonText:
    """Return texts in a row, or what of them cannot be written."""
    parts = list(parts)
    unknown = tuple(what for part in parts if not part.text for what in part.unknown)
    if any(not part.text for part in parts):
        return PythonText(unknown=unknown)
    names = dict(imports or {})
    for part in parts:
        names |= part.imports
    return PythonText(f"{begin}{between.join(part.text for part in parts)}{end}", names)


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith("<") or is_library_file(file)


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the script's own files, the innermost first."""
    while frame is not None:
        if not _is_library(frame.f_code.co_filename) and not _is_ours(frame):
            yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("unipar.observing.")


def place_in_script(frame: FrameType | None) -> CodePlace | None:
    """Return the line of the script from which a frame was called."""
    return next((line_of_frame(f) for f in script_frames(frame)), None)


def line_of_frame(frame: FrameType) -> CodePlace:
    """Return the line at which a frame is."""
    return CodePlace(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name)


def variables_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that code in a frame sees, those of its function first."""
    yield from frame.f_locals.items()
    if frame.f_locals is not frame.f_globals:
        yield from frame.f_globals.items()
