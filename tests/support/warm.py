"""First work of each process of unipar, done once in the server: forks have validators of configs, and backends.

It is imported last: what libraries would do at this process's end is left out in its forks, which else unregister
torch's operators one by one, and the memory that all modules have filled moves into huge pages.
"""

from __future__ import annotations

import weakref

from tests.support.huge_pages import use_huge_pages
from unipar.backend import registry
from unipar.config import Config

Config.model_rebuild()
for name in registry.backend_names():
    registry.find_backend(name)
for finalizer in list(vars(weakref.finalize)["_registry"]):
    finalizer.atexit = False
use_huge_pages()
