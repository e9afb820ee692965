"""First work of each process of unipar, done once in the server: forks have validators of configs, and backends.

DeepSpeed's own first work, too: it compiles small programs to see which of its operations could be built. What
libraries would do at this process's end is left out in its forks, where torch would unregister its operators one by
one. The module is imported last: then the memory that all modules have filled moves into huge pages.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from tests.support.forks import metered_environment
from unipar.backend import registry
from unipar.config import Config

HUGE = 1 << 21
MADV_COLLAPSE = 25
"""Linux 6.1 and later; elsewhere the call fails, and pages stay as they are."""


def use_huge_pages() -> int:
    """Move this process's heap and anonymous memory into huge pages where they fill them; return how many."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for line in Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines():
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        if rights == "rw-p" and path in ([], ["[heap]"]):
            begin, end = (int(word, 16) for word in span.split("-"))
            pages = range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE)
            moved += sum(libc.madvise(page, HUGE, MADV_COLLAPSE) == 0 for page in pages)
    return moved


metered_environment()  # it runs a program to see whether allocations can be counted
Config.model_rebuild()
for name in registry.backend_names():
    registry.find_backend(name)
if "deepspeed" in sys.modules:
    with suppress(ImportError, AttributeError):  # other versions have other first work
        _ = importlib.import_module("deepspeed.ops").__compatible_ops__
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
for finalizer in list(vars(weakref.finalize)["_registry"]):
    finalizer.atexit = False
use_huge_pages()
