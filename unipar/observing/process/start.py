"""Start of the observer in a process: waits, at no cost, for the first model that the process makes."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from unipar.observing.process.patches import Patches

if TYPE_CHECKING:
    from unipar.observing.process.observer import Observer

_observer: Observer | None = None
_patches = Patches()


def install() -> None:
    """Wait for the first module that is made in the main thread; note clips from now on, which scripts import early."""
    _patches.around(torch.nn.Module, "__init__", before=_module_made)
    _patches.around(torch.optim.Optimizer, "__init__", before=_optimizer_made)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        _patches.around(owner, "clip_grad_norm_", before=_clip_begins, after=_clip_ends)


def _module_made(module: Any, *_: Any, **__: Any) -> None:
    """Begin to observe, unless a library makes a module while it is imported, or this is a worker that reads data."""
    if _observer is None:
        _begin()
    if _observer is not None:
        _observer.module_made(module)


def _optimizer_made(*_: Any, **__: Any) -> None:
    """Begin to observe a model that this process has from another one, and did not make."""
    if _observer is None:
        _begin()


def _begin() -> None:
    global _observer
    if threading.current_thread() is not threading.main_thread() or _is_importing():
        return
    if torch.utils.data.get_worker_info() is not None:
        return
    from unipar.observing.process.observer import Observer

    _observer = Observer(_patches)
    _observer.begin()


def _is_importing() -> bool:
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _clip_begins(*_: Any, **__: Any) -> None:
    if _observer is not None:
        _observer.clip_begins()


def _clip_ends(
    norm: Any, parameters: Any = None, max_norm: Any = None, norm_type: Any = 2.0, *_: Any, **__: Any
) -> None:
    if _observer is not None:
        _observer.clip_ends(norm, max_norm, norm_type)
