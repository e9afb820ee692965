"""Values of module-level variables that a task's code reads: sent to the ranks, which import its modules themselves.

A rank imports the user's script without its `if __name__ == "__main__"` block, and so lacks what the block has set.
Values are sent as JSON: unpickling would run code.
"""

from __future__ import annotations

import base64
import dis
import enum
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final, final

from unipar.errors import TaskError
from unipar.task.importing import imported_files
from unipar.task.location import module_place
from unipar.utils.files import is_library_file

ScriptValue = tuple[str, str, Any]
"""A module, by its name or its file; the name of a variable in it, or `Class.attribute`; its value as JSON data."""

MOST_CODE: Final = 2000
"""Functions whose code is read; more belong to a library rather than to a script."""

MOST_ITEMS: Final = 10_000
"""Items of a value that is sent; a larger one is compared by its type."""

MOST_BYTES: Final = 2**18
"""Bytes of an array that is sent; a larger one is compared by its type, shape and dtype."""

SHORTEST_SECRET: Final = 8
"""Characters from which on a text that is the value of an environment variable is sent as the variable's name.

The run folder keeps what is sent, and is no place for a token; ranks have the variable themselves.
"""

_OPAQUE: Final = '{"opaque":'
_MISSING: Final = object()
_USUAL: Final[Any] = object
_WRAPPERS: Final = (staticmethod, classmethod, property, cached_property, partial)


# In the parent


def collect_script_values(definitions: Sequence[Any]) -> Sequence[ScriptValue]:
    """Return the values that these classes and functions, and what they call in the user's files, read by name."""
    read = _ReadValues()
    for definition in definitions:
        read.follow(definition)
    return tuple((module, name, value) for (module, name), value in sorted(read.values.items()))


@final
class _ReadValues:
    """Module-level variables and class attributes that code reads, and their values as JSON data."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        self._visited: set[int] = set()
        self._read = 0

    def follow(self, thing: Any) -> None:
        """Read the code of a class, a function or what wraps one, unless it is a library's."""
        if id(thing) in self._visited:
            return
        self._visited.add(id(thing))
        if isinstance(thing, type):
            for kind in thing.__mro__:
                if _is_users(kind.__module__):
                    self._follow_class(kind)
        elif isinstance(thing, FunctionType):
            if _is_users(str(thing.__globals__.get("__name__"))):
                self._follow_code(thing.__code__, thing.__globals__)
            for cell in thing.__closure__ or ():
                self.follow(_content(cell))
        elif isinstance(thing, _WRAPPERS):
            for inner in ("__func__", "fget", "func"):
                self.follow(getattr(thing, inner, None))
        if not isinstance(thing, type) and (wrapped := getattr(thing, "__dict__", {}).get("__wrapped__")) is not None:
            self.follow(wrapped)

    def _follow_class(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if kind in type(value).__mro__:  # a member of an enumeration; isinstance refuses a TypedDict
                continue
            if isinstance(value, (FunctionType, *_WRAPPERS)):
                self.follow(value)
            elif _is_data_attribute(name, value) and "<" not in kind.__qualname__:
                self._keep(_module_key(kind.__module__), f"{kind.__qualname__}.{name}", value)

    def _follow_code(self, code: CodeType, variables: dict[str, Any]) -> None:
        self._read += 1
        if self._read > MOST_CODE:
            return
        if not variables.keys().isdisjoint(code.co_names):
            for name, attribute in _global_reads(code):
                if name in variables:
                    self._read_name(str(variables.get("__name__", "")), name, variables[name], attribute)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._follow_code(inner, variables)

    def _read_name(self, module: str, name: str, value: Any, attribute: str = "") -> None:
        """Keep a value that code reads as `name`, and follow it; of a module, the `attribute` that is read next."""
        if isinstance(value, ModuleType):
            if attribute in vars(value) and _is_users(value.__name__):
                self._read_name(value.__name__, attribute, vars(value)[attribute])
            return
        self.follow(value)
        if not isinstance(value, type | FunctionType) and _is_users(type(value).__module__):
            self.follow(type(value))
        self._keep(_module_key(module), name, value)

    def _keep(self, module: str, name: str, value: Any) -> None:
        encoded = encode_value(value)
        if encoded != {"name": [module, name]} and (module, name) not in self.values:
            self.values[module, name] = encoded


def _global_reads(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the name of each global variable that code reads, and the attribute of it that it reads next, or ""."""
    instructions = list(dis.get_instructions(code))
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield str(instruction.argval), str(following.argval) if reads and following is not None else ""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def _is_data_attribute(name: str, value: Any) -> bool:
    """Return whether an attribute of a class is data: no method, no inner class, nothing of Python's own."""
    if name.startswith(("__", "_abc_")) or isinstance(value, type | ModuleType):
        return False
    return not hasattr(type(value), "__get__")


def _is_users(name: str) -> bool:
    """Return whether a module is the user's own: it comes from a file that no installed package brought."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] != "unipar" and file is not None and not is_library_file(file)


# In a rank


def set_script_values(values: Sequence[ScriptValue]) -> None:
    """Give the modules that this process has imported the values of the script where theirs differ.

    Raise TaskError for a value that differs and cannot be sent.
    """
    for key, name, sent in values:
        module = imported_files.get(key) or sys.modules.get(key)
        path, _, last = name.rpartition(".")
        owner = _attribute(module, path) if path else module
        if owner is None:
            continue
        held = vars(owner).get(last, _MISSING)
        here = None if held is _MISSING else encode_value(held)
        if held is not _MISSING and _text(here) == _text(sent):
            continue
        if _OPAQUE not in _text(sent):
            try:
                setattr(owner, last, decode_value(sent))
                continue
            except (ImportError, AttributeError, TypeError, KeyError):
                pass  # as an example, of a class that the block defines
        there = "no such variable" if held is _MISSING else describe_value(here)
        raise TaskError(
            f"the task reads {name} of {Path(key).name}, which is {describe_value(sent)} in the script, and "
            f'{there} in its ranks, which import the file without its `if __name__ == "__main__"` block; such a value '
            "cannot be sent to them: set it above the block, or create it in the task's methods, from task.args"
        )


def _text(encoded: Any) -> str:
    return json.dumps(encoded, separators=(",", ":"))


# Values as JSON data


def encode_value(value: Any) -> Any:
    """Return a value as JSON data; what cannot be sent is {"opaque": description}, by which it is compared."""
    encoder = _Encoder()
    try:
        encoded = encoder.encode(value)
    except Exception:  # whatever attributes of the user's objects raise
        return {"opaque": f"a {type(value).__name__}"}
    return encoded if encoder.left > 0 else {"opaque": f"a large {type(value).__name__}"}


@final
class _Encoder:
    """Encoder of one value."""

    def __init__(self) -> None:
        self.left = MOST_ITEMS
        self._open: set[int] = set()
        self._variables = {value: name for name, value in sorted(os.environ.items(), reverse=True)}

    def encode(self, value: Any) -> Any:
        self.left -= 1
        if self.left < 0 or id(value) in self._open:
            return _opaque(value)
        if value is None or type(value) in (bool, int, float):
            return value
        if type(value) is str and len(value) < MOST_BYTES:
            variable = self._variables.get(value) if len(value) >= SHORTEST_SECRET else None
            return value if variable is None else {"environment": variable}
        self._open.add(id(value))
        try:
            return self._encode(value)
        finally:
            self._open.discard(id(value))

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind in (set, frozenset):
            return {kind.__name__: sorted((self.encode(item) for item in value), key=_text)}
        if kind is dict:
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if callable(value) and (name := _own_name(value)):
            known = _attribute(sys.modules.get(str(value.__module__)), name) is value
            return {"name": [_module_key(str(value.__module__)), name]} if known else {"opaque": f"the function {name}"}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, enum.Enum):
            return {"enum": [_name_of(kind), value.name]}
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
            return {kind.__name__: str(value)}
        if (array := _encode_array(value)) is not None:
            return array
        if isinstance(value, dict):  # a class of the user's, or of a library of configs
            return {"mapping": [_name_of(kind), self._encode(dict(value))]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"named tuple": [_name_of(kind), [self.encode(item) for item in value]]}
        if kind is SimpleNamespace or _is_plain_object(kind, value):
            state = self.encode(vars(value) if kind.__getstate__ is _USUAL.__getstate__ else value.__getstate__())
            if _OPAQUE not in _text(state):
                return {"object": [_name_of(kind), state]}
        return _opaque(value)


def _encode_array(value: Any) -> Any:
    """Return a small tensor or array as JSON data, a large one as its type, dtype and shape; None for other values."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor:
        shape, dtype = list(value.shape), str(value.dtype)
        here = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        if not here or numpy is None or value.numel() * value.element_size() > MOST_BYTES:
            return {"opaque": f"a tensor of {dtype} {shape} on {value.device}"}
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": [dtype, shape, base64.b64encode(flat.tobytes()).decode()]}
    if numpy is not None and isinstance(value, numpy.generic):
        return {"scalar": _encode_array(numpy.asarray(value))["array"]}
    if numpy is not None and type(value) is numpy.ndarray:
        shape, dtype = list(value.shape), value.dtype.str
        if value.dtype.hasobject or value.nbytes > MOST_BYTES:
            return {"opaque": f"an array of {dtype} {shape}"}
        return {"array": [dtype, shape, base64.b64encode(value.tobytes()).decode()]}
    return None


def _own_name(value: Any) -> str:
    """Return the name under which a function or a class was defined; "" for other objects that can be called."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) and hasattr(value, "__module__") else ""


def _attribute(owner: Any, path: str) -> Any:
    """Return what a dotted path leads to, or None."""
    for step in path.split("."):
        owner = getattr(owner, step, None)
    return owner


def _is_plain_object(kind: type, value: Any) -> bool:
    """Return whether an object is no more than its attributes, so that a copy of them is a copy of the object."""
    own_state = kind.__getstate__ is not _USUAL.__getstate__ or hasattr(kind, "__setstate__")
    return (
        hasattr(value, "__dict__")
        and kind.__reduce_ex__ is _USUAL.__reduce_ex__
        and kind.__reduce__ is _USUAL.__reduce__
        and kind.__new__ is _USUAL.__new__
        and "<" not in kind.__qualname__
        and (not own_state or any(base.__module__ == "pydantic.main" for base in kind.__mro__))
        and (own_state or not any(getattr(base, "__slots__", ()) for base in kind.__mro__))
    )


def _opaque(value: Any) -> dict[str, str]:
    kind = type(value)
    shown = repr(value) if isinstance(value, int | float | complex | str | bytes) else f"a {kind.__name__}"
    return {"opaque": shown if len(shown) < 100 else f"{shown[:100]}..."}


def _module_key(name: str) -> str:
    """Return how other processes import a module: by its name, or from its file."""
    for file, module in imported_files.items():
        if module.__name__ == name:
            return file
    module, file = module_place(name)
    return module or file or name


def _name_of(thing: Any) -> list[str]:
    return [_module_key(str(thing.__module__)), str(thing.__qualname__)]


def _thing_named(name: Sequence[str]) -> Any:
    value: Any = imported_files.get(name[0]) or import_module(name[0])
    for step in name[1].split("."):
        value = getattr(value, step)
    return value


def decode_value(encoded: Any) -> Any:
    """Return the value that `encode_value` has made JSON data of."""
    if not isinstance(encoded, dict):
        return encoded
    ((how, content),) = encoded.items()
    return _DECODERS[how](content)


def _decode_object(content: Any) -> Any:
    name, state = content
    kind = _thing_named(name)
    made = kind.__new__(kind)
    if hasattr(kind, "__setstate__"):
        made.__setstate__(decode_value(state))
    else:
        vars(made).update(decode_value(state))
    return made


def _decode_tensor(content: Any) -> Any:
    import torch

    dtype, shape, text = content
    data = bytearray(base64.b64decode(text))
    kind = _torch_name(dtype)
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def _decode_array(content: Any) -> Any:
    import numpy

    dtype, shape, text = content
    return numpy.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).reshape(shape)


def _torch_name(name: str) -> Any:
    return getattr(import_module("torch"), name.removeprefix("torch."))


def _items(content: Any) -> list[Any]:
    return [decode_value(item) for item in content]


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "list": _items,
    "tuple": lambda content: tuple(_items(content)),
    "set": lambda content: set(_items(content)),
    "frozenset": lambda content: frozenset(_items(content)),
    "dict": lambda content: {decode_value(key): decode_value(item) for key, item in content},
    "name": _thing_named,
    "path": Path,
    "environment": lambda name: os.environ[name],
    "enum": lambda content: _thing_named(content[0])[content[1]],
    "dtype": _torch_name,
    "device": lambda content: import_module("torch").device(content),
    "mapping": lambda content: _thing_named(content[0])(decode_value(content[1])),
    "named tuple": lambda content: _thing_named(content[0])(*_items(content[1])),
    "object": _decode_object,
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": lambda content: _decode_array(content)[()],
}


def describe_value(encoded: Any) -> str:
    """Return a value that was made JSON data in a few words."""
    if not isinstance(encoded, dict):
        return repr(encoded)
    ((how, content),) = encoded.items()
    if how == "opaque":
        return str(content)
    return f"a {content[0][1]}" if how in ("object", "mapping", "named tuple") else f"a {how}"
