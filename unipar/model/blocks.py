"""Repeated blocks of a model: the units in which parameters are split and recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from unipar.config import Config
from unipar.errors import ConfigError, TaskError
from unipar.utils.text import first_few


def find_blocks(module: nn.Module, config: Config, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the blocks: those of the config, else of the task, else those found in the model."""
    known = [name for name, _ in module.named_modules() if name]
    if config.model.blocks == "none":
        return ()
    if config.model.blocks != "auto":
        wanted = config.model.blocks
        for pattern in wanted:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConfigError(
                    f"model.blocks: no module of the model is called {pattern!r}; it has {first_few(known, most=8)}"
                )
        return _outermost_names([name for name in known if any(fnmatchcase(name, p) for p in wanted)])
    if patterns is None:
        return find_repeated_modules(module)
    for name in patterns:
        if name not in known:
            raise TaskError(
                f"blocks() names {name!r}, which the model does not have; it has {first_few(known, most=8)}"
            )
    return _outermost_names(list(patterns))


def find_repeated_modules(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the outermost modules with parameters that share a container with another of their class."""
    names: list[str] = []
    for name, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        children = [(n, c) for n, c in container.named_children() if any(True for _ in c.parameters())]
        times = Counter(type(c) for _, c in children)
        prefix = f"{name}." if name else ""
        names += [prefix + n for n, c in children if times[type(c)] > 1 and not isinstance(c, nn.ModuleList)]
    return _outermost_names(names)


def _outermost_names(names: list[str]) -> tuple[str, ...]:
    kept = dict.fromkeys(names)
    return tuple(n for n in kept if not any(n.startswith(f"{other}.") for other in kept))
