"""`Cell`; names of the levels of sharding and of precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from typing_extensions import override

from unipar.errors import ConfigError

Shard = Literal["nothing", "optimizer", "gradients", "parameters"]

SHARDS: tuple[Shard, ...] = ("nothing", "optimizer", "gradients", "parameters")

Precision = Literal["fp32", "fp64", "fp16", "bf16-mixed", "bf16-master"]


@dataclass(frozen=True)
class Cell:
    """A backend with a level of sharding: `native/parameters`, `deepspeed/gradients+library`, `single`."""

    backend: str
    shard: Shard = "nothing"
    variant: str | None = None

    @override
    def __str__(self) -> str:
        if self.backend == "single":
            return self.backend
        return f"{self.backend}/{self.shard}" + (f"+{self.variant}" if self.variant else "")

    @property
    def slug(self) -> str:
        """The cell as part of a file name."""
        return str(self).replace("/", "-")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cell that a text such as `native/parameters` names."""
        head, _, variant = text.partition("+")
        backend, slash, shard = head.partition("/")
        if not backend or (slash and shard not in SHARDS) or text.endswith("+"):
            raise ConfigError(
                f"{text!r} is not a cell: write backend/shard or backend/shard+variant, "
                f"where shard is one of {', '.join(SHARDS)} (a bare backend means /nothing)"
            )
        return cls(backend, shard if shard in SHARDS else "nothing", variant or None)
