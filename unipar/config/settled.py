"""`SettledConfig`: a config whose strategy, batch sizes, number of ranks and device are decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from pydantic import TypeAdapter

from unipar.config.config import Config
from unipar.config.sections.batch import BatchSizes
from unipar.config.sections.strategy import Strategy

Changes = Mapping[str, Any]
"""Values of a config by dotted key."""

NO_CHANGES: Final[Changes] = MappingProxyType({})


@dataclass(frozen=True)
class SettledConfig:
    """A config with all automatic values decided before the start; workers read it from the run folder."""

    config: Config
    """Config, with `parallel.data` as a number."""

    strategy: Strategy
    sizes: BatchSizes
    """Sizes of the batch in this number of ranks."""

    device: str
    """Device: `cpu`, `cuda`, `cuda:N` ...; `config.device` may still be auto."""

    @classmethod
    def of(cls, config: Config, strategy: Strategy, ranks: int, device: str, changes: Changes = NO_CHANGES) -> Self:
        """Return the config settled for a number of ranks; raise ConfigError if they or the batch do not fit.

        `changes`: values under other dotted keys, none of which is one of the batch.
        """
        config.parallel.settle(ranks)
        data = ranks // config.parallel.axes.ranks
        sizes = config.batch.settle(data)
        return cls(config.changed({"parallel.data": data, **changes}), strategy, sizes, device)

    @property
    def on_device(self) -> Config:
        """Config with its device known, so that no rank chooses another."""
        return self.config.on_device(self.device)

    @property
    def ranks(self) -> int:
        """Number of ranks in all."""
        return self.sizes.ranks * self.strategy.axes.ranks

    def changed(self, changes: Changes) -> Self:
        """Return a copy with other values under dotted keys, in the same strategy; the batch is settled again."""
        return self.of(self.config.changed(changes), self.strategy, self.ranks, self.device)

    def texts(self, launch: Mapping[str, Any]) -> tuple[str, str]:
        """Return the texts of config.json and launch.json, as `read_settled` reads them; `launch`: its other keys."""
        return self.config.json_for_ranks(), json.dumps({**launch, "settled": self.to_json()}, indent=2)

    def to_json(self) -> dict[str, Any]:
        """Return strategy, sizes and device for launch.json; the config itself is in config.json."""
        return {"strategy": str(self.strategy), "sizes": asdict(self.sizes), "device": self.device}

    @classmethod
    def from_json(cls, config: str, data: Mapping[str, Any]) -> Self:
        """Return a settled config from the JSON text of its config and from the data of `to_json`."""
        sizes = TypeAdapter(BatchSizes).validate_python(data["sizes"])
        return cls(Config.model_validate_json(config), Strategy.parse(data["strategy"]), sizes, data["device"])


def read_settled(run: Path) -> SettledConfig:
    """Return the settled config of a run from its folder."""
    launch = json.loads((run / "launch.json").read_text("utf-8"))
    return SettledConfig.from_json((run / "config.json").read_text("utf-8"), launch["settled"])
