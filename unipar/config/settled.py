"""A config as the checks before a start left it: its cell, its batch, its ranks and its device are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from unipar.config.cell import Cell
from unipar.config.config import Config
from unipar.config.sections.batch import BatchSizes


@dataclass(frozen=True)
class SettledConfig:
    """A config whose open questions are answered; it travels to workers, which look nothing up again."""

    config: Config
    """With `parallel.data` a number."""

    cell: Cell
    sizes: BatchSizes
    """The batch in this number of ranks."""

    device: str
    """`cpu`, `cuda` or `cuda:N`; the config itself may still say auto."""

    @classmethod
    def of(cls, config: Config, cell: Cell, ranks: int, device: str) -> Self:
        """Settle a config in a number of ranks; raise ConfigError where its batch does not fit them."""
        sizes = config.batch.settle(ranks)
        return cls(config.changed({"parallel.data": ranks}), cell, sizes, device)

    @property
    def ranks(self) -> int:
        return self.sizes.ranks

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the same with other values under dotted keys, in the same cell; the batch is settled anew."""
        return self.of(self.config.changed(changes), self.cell, self.ranks, self.device)

    def to_json(self) -> dict[str, Any]:
        """Return what was found out, for launch.json; the config itself is in config.json beside it."""
        return {"cell": str(self.cell), "sizes": asdict(self.sizes), "device": self.device}

    @classmethod
    def from_json(cls, config: str, data: Mapping[str, Any]) -> Self:
        """Read back a config that was `written`, and what `to_json` said of it."""
        sizes = BatchSizes(**data["sizes"])
        return cls(Config.model_validate_json(config), Cell.parse(data["cell"]), sizes, data["device"])


def read_config(run: Path) -> Config:
    """Return the config in a run folder."""
    return Config.model_validate_json((run / "config.json").read_text("utf-8"))


def read_settled(run: Path) -> SettledConfig:
    """Return what was settled before the start of a run, from its folder."""
    told = json.loads((run / "launch.json").read_text("utf-8"))
    return SettledConfig.from_json((run / "config.json").read_text("utf-8"), told["settled"])
