"""Call sites: the source line that started an operation which allocated memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from unipar.backend import Category
from unipar.memory.sources.events import CallSite

_SKIPPED_FOLDERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

CallFrame = tuple[str, str, int]
"""A frame of the call stack: file, function, line."""


def find_call_site(
    frames: Iterable[CallFrame], sites: Mapping[str, Category], operation: str
) -> tuple[str, Category | None]:
    """Return the nearest frame listed in `sites`, with its category; else the nearest outside torch, and None."""
    nearest = ""
    before = f"{operation} in " if operation else ""
    for file, function, line in frames:
        spelled = f"{file}:{function}"
        for site, category in sites.items():
            if spelled.endswith(site):
                return f"{before}{function}", category
        if not nearest and not spelled.startswith(_SKIPPED_FOLDERS):
            nearest = f"{before}{Path(file).name}:{line}"
    return nearest or operation, None


@final
class CallSiteRecorder(TorchDispatchMode):
    """Dispatch mode around a step: records the events of each operation that allocates, and its call site."""

    def __init__(self, at: Callable[[], int], recorded: list[CallSite], sites: Mapping[str, Category]) -> None:
        super().__init__()
        self._at, self._recorded, self._sites = at, recorded, sites

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Return True: what torch.compile has compiled runs under it, instead of what it was compiled from."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        low = self._at()
        out = func(*args, **(kwargs or {}))
        high = self._at()
        if high > low and (not self._recorded or self._recorded[-1].high <= low):
            self._recorded.append(
                CallSite(low, high, *find_call_site(_outer_frames(currentframe()), self._sites, str(func)))
            )
        return out


def _outer_frames(frame: FrameType | None) -> Iterable[CallFrame]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back
