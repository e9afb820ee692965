"""Pickled files of other libraries, read without running what they name: unknown classes become inert objects."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from unipar.errors import CheckpointError

_PLAIN = frozenset(
    ("bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "set", "slice", "str", "tuple")
)
_TORCH = frozenset(
    (
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.serialization", "_get_layout"),
    )
)


class Inert:
    """Object in place of one whose class is not known: it keeps its attributes and arguments, and does nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        top = module_name.partition(".")[0]
        known = (module_name, global_name) in _TORCH or (top in ("builtins", "__builtin__") and global_name in _PLAIN)
        if (module_name, global_name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild_plain
        if known:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        return type(global_name, (Inert,), {"__module__": module_name})


def _rebuild_plain(rebuild: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    """Return a tensor of a subclass, or with attributes, as a plain one."""
    return rebuild(*arguments)


def _refuse_old_files(*_: Any, **__: Any) -> Any:
    raise pickle.UnpicklingError("written before PyTorch 1.6; save it again with a newer one")


_MODULE = SimpleNamespace(Unpickler=_Unpickler, load=_refuse_old_files, __name__="inert")


def load_inert(file: Path) -> Any:
    """Return what torch.save has written, with tensors mapped from the file; raise CheckpointError if it cannot."""
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_MODULE)
    except (OSError, RuntimeError, ValueError, EOFError, TypeError, AttributeError, pickle.UnpicklingError) as e:
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CheckpointError(f"{file}: cannot be read as a file of torch.save: {first}") from e
