"""Places of calls in a block's forward: the chain of frames from the block down to a call, the same in every run."""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from unipar_mesh.tensor.rules import name_of_call

_TORCH = os.path.dirname(torch.__file__)
PACKAGE = str(files("unipar_mesh"))
"""Folder of this package, wherever in it a file lies."""

_QUIET = (
    os.path.join(_TORCH, "nn", "modules", "module.py"),
    os.path.join(_TORCH, "overrides.py"),
    *(os.path.join(_TORCH, name) for name in ("utils", "_dynamo", "autograd", "distributed", "_compile.py")),
    PACKAGE,
)
"""Files whose frames differ from run to run: hooks, checkpoints, this package."""

_quiet: dict[int, tuple[CodeType, bool]] = {}  # the code is kept, so that its id stays its own


def _is_quiet(code: CodeType) -> bool:
    known = _quiet.get(id(code))
    if known is None:
        known = _quiet[id(code)] = (code, code.co_filename.startswith(_QUIET))
    return known[1]


def frames_to(end: CodeType) -> list[FrameType]:
    """Return the frames of the program from the calling one up to that of `end`, innermost first."""
    frame, frames = sys._getframe(1), list[FrameType]()  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not end:
        if not _is_quiet(frame.f_code) and not (frames and _wraps(frame, frames[-1])):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _wraps(outer: FrameType, inner: FrameType) -> bool:
    """Return whether both are one wrapper of the same module's method.

    fully_shard makes a subclass of each block's class, and transformers wraps `forward` of every subclass once more.
    """
    return outer.f_code is inner.f_code and outer.f_locals.get("self", outer) is inner.f_locals.get("self", inner)


def innermost_frame() -> FrameType | None:
    """Return the frame of the program that makes the present call."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and _is_quiet(frame.f_code):
        frame = frame.f_back
    return frame


def key_of(frames: list[FrameType]) -> tuple[Any, ...]:
    """Return a key of these frames for this process: quick, and only valid in it."""
    module = innermost_module(frames)
    return (id(module), *((id(f.f_code), f.f_lasti) for f in frames))


def innermost_module(frames: list[FrameType]) -> nn.Module | None:
    """Return the module whose method is the innermost of these frames."""
    for frame in frames:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return module
    return None


def site_of(func: Any, frames: list[FrameType], names: dict[int, str]) -> str:
    """Return a name of this call that holds in every process; `names`: those of the block's modules, by id."""
    module = names.get(id(innermost_module(frames)), "?")
    return "|".join([module, name_of_call(func), *(_place(frame) for frame in frames)])


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname}:{frame.f_code.co_firstlineno}+{frame.f_lasti}"


def leaf_of(func: Any, frame: FrameType) -> tuple[str, str]:
    """Return the function and the place of its call, without the frames above."""
    return name_of_call(func), _place(frame)


def leaf_of_site(site: str) -> tuple[str, str]:
    """Return what `leaf_of` says of a site's innermost frame."""
    _, func, place, *_ = (*site.split("|"), "")
    return func, place


def module_of_site(site: str) -> str:
    """Return the name of the module whose method makes the call; "?" for one outside the block."""
    return site.partition("|")[0]


def line_of(frames: list[FrameType]) -> str:
    """Return file and line of the innermost frame that is not torch's own."""
    own = next((f for f in frames if not f.f_code.co_filename.startswith(_TORCH)), frames[0] if frames else None)
    return "" if own is None else f"{os.path.basename(own.f_code.co_filename)}:{own.f_lineno}"


def run_block(forward: Any, args: Any, kwargs: Any) -> Any:
    """Call a block's forward: the frame at which every chain of a call in it ends."""
    return forward(*args, **kwargs)


BLOCK = run_block.__code__
