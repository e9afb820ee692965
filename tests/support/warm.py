"""First work of each process of unipar, done once in the server: forks have validators of configs, and backends.

DeepSpeed's own first work, too: it compiles small programs to see which of its operations could be built. What
libraries would do at this process's end is left out in its forks, where torch would unregister its operators one by
one. The module is imported last: then the memory that all modules have filled moves into huge pages.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from contextlib import suppress

from tests.support.forks import metered_environment
from tests.support.huge_pages import use_huge_pages
from unipar.backend import registry
from unipar.config import Config

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
