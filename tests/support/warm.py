"""First work of each process of unipar, done once in the server: forks have validators of configs, and backends."""

from __future__ import annotations

from unipar.backend import registry
from unipar.config import Config

Config.model_rebuild()
for name in registry.backend_names():
    registry.find_backend(name)
