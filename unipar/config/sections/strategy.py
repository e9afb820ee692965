"""`Strategy`; names of the levels of sharding and of precisions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

from typing_extensions import override

from unipar.errors import ConfigError
from unipar.utils.text import did_you_mean

Shard = Literal["nothing", "optimizer", "gradients", "parameters"]

SHARDS: tuple[Shard, ...] = ("nothing", "optimizer", "gradients", "parameters")

SHARD_OF_WORD: Final[Mapping[str, Shard]] = {
    "ddp": "nothing",
    "fsdp": "parameters",
    "fsdp2": "parameters",
    **{f"zero{stage}": shard for stage, shard in enumerate(SHARDS)},
}
"""Words that people have for a level of sharding, which `parallel.shard` takes too."""

Precision = Literal["fp32", "fp64", "fp16", "bf16-mixed", "bf16-master", "fp8", "fp8-rowwise"]


PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "zerobubble"]

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "interleaved", "zerobubble")

EXPERT_AXIS = "expert"
AXES = ("tensor", "pipeline", "context", EXPERT_AXIS)
"""Ways of splitting one copy's work among ranks: those of `expert` train on different samples, all others on the same.
"""


@dataclass(frozen=True)
class Axes:
    """Numbers of ranks along the axes of the mesh beside the data's, and how two of the axes work."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks of the data's axis that have a part of each layer's experts each."""

    sequence: bool = False
    """Whether activations between blocks are split along the sequence, over the ranks of `tensor`."""

    schedule: PipelineSchedule = "1f1b"
    """Order in which the stages of a pipeline run microbatches."""

    @property
    def ranks(self) -> int:
        """Number of ranks that train on the same samples."""
        return self.tensor * self.pipeline * self.context

    @property
    def fewest_ranks(self) -> int:
        """Number of ranks of the smallest mesh with these sizes; every world is a multiple of it."""
        return self.ranks * self.expert

    @property
    def split(self) -> bool:
        """Whether ranks have different parts of the model, beyond what sharding its state does."""
        return self.fewest_ranks > 1

    @property
    def pieces(self) -> int:
        """Number of stages that each rank of the pipeline has: one, or two that are not neighbours."""
        return 2 if self.schedule in ("interleaved", "zerobubble") else 1

    @property
    def stages(self) -> int:
        """Number of stages into which the blocks are cut; stage k is on rank k mod `pipeline`."""
        return self.pipeline * self.pieces

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks by axis, without those of one rank."""
        return {name: size for name in AXES if (size := getattr(self, name)) > 1}

    @property
    def words(self) -> tuple[str, ...]:
        """Words that name them in a strategy: `tensor2`, `sequence`."""
        sizes = tuple(f"{name}{size}" for name, size in self.sizes.items())
        schedule = (self.schedule,) if self.schedule != "1f1b" else ()
        return (*sizes, *(("sequence",) if self.sequence else ()), *schedule)

    @override
    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())

    def with_data(self, data: int | str) -> str:
        """Return words for the mesh with this many ranks of the data: `data 4 (expert 2) x tensor 2`."""
        experts = f" (expert {self.expert})" if self.expert > 1 else ""
        return " x ".join((f"data {data}{experts}", *filter(None, [str(replace(self, expert=1))])))


def idle_words(axes: Axes) -> str | None:
    """Return a sentence on what of the axes has no effect, or None."""
    if axes.sequence and axes.tensor == 1:
        return "sequence splits activations over the ranks of tensor, and tensor is 1: give tensor, or leave it out"
    if axes.schedule != "1f1b" and axes.pipeline == 1:
        return f"{axes.schedule} is a schedule of pipelines, and pipeline is 1: give pipeline, or leave it out"
    return None


@dataclass(frozen=True)
class Strategy:
    """A backend with a level of sharding: `native/parameters`, `deepspeed/gradients+library`, `single`.

    Further axes of the mesh follow with their sizes: `native/parameters+tensor2+pipeline2`.

    Examples:
        >>> strategy = unipar.Strategy.parse("native/parameters+tensor2")
        >>> strategy.backend, strategy.shard, strategy.axes.tensor
        ('native', 'parameters', 2)
    """

    backend: str
    shard: Shard = "nothing"
    variant: str | None = None
    axes: Axes = Axes()

    @override
    def __str__(self) -> str:
        if self.backend == "single":
            return self.backend
        words = (*((self.variant,) if self.variant else ()), *self.axes.words)
        return "+".join((f"{self.backend}/{self.shard}", *words))

    @property
    def without_axes(self) -> Strategy:
        """The same strategy with data parallelism alone."""
        return replace(self, axes=Axes())

    @property
    def slug(self) -> str:
        """The strategy as part of a file name."""
        return str(self).replace("/", "-")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the strategy that a text such as `native/parameters+tensor2` names.

        Args:
            text: Backend, level of sharding, variant and axes.

        Returns:
            The strategy; its backend need not be installed.

        Raises:
            ConfigError: The text is not a strategy.
        """
        head, *words = text.split("+")
        backend, slash, shard = head.partition("/")
        if not backend or (slash and shard not in SHARDS) or "" in words:
            raise ConfigError(
                f"{text!r} is not a strategy: write backend/shard or backend/shard+variant, "
                f"where shard is one of {', '.join(SHARDS)} (a bare backend means /nothing)"
                f"{did_you_mean(shard, SHARDS) if shard not in SHARDS else ''}"
            )
        axis_sizes: dict[str, Any] = {}
        variants: list[str] = []
        for word in words:
            if match := _AXIS_WORD.fullmatch(word):
                key, value = match[1], int(match[2])
            elif word in SCHEDULES:
                key, value = "schedule", word
            elif word == "sequence":
                key, value = "sequence", True
            else:
                variants.append(word)
                continue
            if key in axis_sizes:
                raise ConfigError(f"{text!r} is not a strategy: it says {key} twice; say it once")
            axis_sizes[key] = value
        axes = Axes(**axis_sizes)
        if 0 in (axes.tensor, axes.pipeline, axes.context, axes.expert):
            raise ConfigError(f"{text!r} is not a strategy: a size is at least 1")
        if (why := idle_words(axes)) is not None:
            raise ConfigError(f"{text!r} is not a strategy: {why}")
        return cls(backend, shard if shard in SHARDS else "nothing", "+".join(variants) or None, axes)


_AXIS_WORD = re.compile(rf"({'|'.join(AXES)})(\d+)")
