"""`ObservedRank`: what one process of an observed script was seen to do, as its file holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import ConfigDict, Field, ValidationError

from unipar.backend.observed_library import TrainingFault
from unipar.config import Precision, Section
from unipar.errors import ReportError
from unipar.profiling.work import RankWork
from unipar.results.observed_recipe import Recipe

LAST_STEP: Final = 0
"""Key of what was recorded when the process ended."""


class LocalFault(Section):
    """Fault that a process found by itself."""

    kind: TrainingFault
    step: int
    parameter: str = ""
    detail: str
    """Clause that says what was seen."""


class ObservedState(Section):
    """Values of a process at one step, as digests by name."""

    weights: dict[str, int] = Field(default_factory=dict)
    buffers: dict[str, int] = Field(default_factory=dict)
    states: dict[str, int] = Field(default_factory=dict)
    gradients: dict[str, int] = Field(default_factory=dict)
    """Gradients that the optimizer was given."""

    steps: int
    """Number of steps that the process had taken."""


class ObservedRank(Section):
    """Record of what one process of an observed script did; losses and norms may be not finite."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    rank: int
    size: int
    """Number of ranks in its process group; 1 without one."""

    launched_size: int = 1
    """Number of processes that the launcher announces."""

    host: str = ""
    pid: int = 0
    device: str = "cpu"
    libraries: tuple[str, ...] = ()
    """Names of the libraries that call the optimizer, the outermost first."""

    models: tuple[str, ...] = ()
    """Class of each trained model, with its wrappers, and with its module."""

    optimizers: tuple[str, ...] = ()
    parameters: int = 0
    dtypes: dict[str, int] = Field(default_factory=dict)
    """Number of trained parameters by dtype."""

    steps: int = 0
    begun: int | None = None
    """Number of steps with one that the end of the process has interrupted; None if the process was killed."""

    skipped: int = 0
    """Steps that loss scaling skipped."""

    seconds: float | None = None
    """Median time of a step in which nothing was recorded."""

    phases: dict[str, float] = Field(default_factory=dict)
    """Median time of each phase in these steps."""

    waiting: float | None = None
    """Share of these steps for which the training thread waited, without reading data; None if it is not known."""

    work: RankWork | None = None
    """Operations of this rank in one step, and its device; None if no step was counted."""

    backwards: tuple[int, ...] = ()
    """Number of backwards in each of the first steps."""

    losses: tuple[float, ...] = ()
    """Loss in each of the first steps, as this process has it."""

    batches: tuple[int, ...] = ()
    """Digests of the first batches that the script's loader gave; empty without a loader of torch."""

    first_dimension: int | None = None
    """First dimension of the first tensor in a batch."""

    norms: dict[int, float] = Field(default_factory=dict)
    """Gradient norm before the clip, by step; of this rank's part if the gradients are split."""

    norms_after: dict[int, float] = Field(default_factory=dict)
    """Norm of the gradients that the optimizer was given, by step."""

    clip: float | None = None
    """Largest norm of the script's clip; None without one."""

    split: bool = False
    """Whether ranks hold different parts of the weights or their gradients."""

    splits_tensors: bool = False
    """Whether ranks split the model's tensors and read the same samples, as tensor parallelism does."""

    uneven: bool = False
    """Whether the model's wrapper was told that ranks have unequally many batches."""

    rates: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    """Learning rates of the optimizer's groups, by step."""

    settings: dict[str, float] = Field(default_factory=dict)
    """Settings of the first optimizer's first group that are numbers, such as weight_decay."""

    random: dict[int, int] = Field(default_factory=dict)
    """Digest of the random numbers' state at the beginning of a backward, by step."""

    dropout: bool = False
    batch_norms: tuple[str, ...] = ()
    """Trained modules of batch normalisation that are not synchronized."""

    initial: dict[str, int] = Field(default_factory=dict)
    """Digests of the weights before the first update."""

    states: dict[int, ObservedState] = Field(default_factory=dict)
    """Values after some steps; under LAST_STEP those at the end."""

    faults: tuple[LocalFault, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences on what could not be observed."""

    recipe: Recipe | None = None
    """Recipe of the script's training; None before its first update."""


def guess_precision(rank: ObservedRank, recipe: Recipe) -> tuple[Precision, str]:
    """Return the precision of a training, and what is said of it."""
    main = max(rank.dtypes, key=lambda dtype: rank.dtypes[dtype], default="float32")
    if main == "float64":
        return "fp64", ""
    if recipe.loss_scaling or recipe.autocast == "float16":
        return ("fp16", "") if rank.device == "cuda" else ("fp32", f"to do: fp16 is for CUDA, not for {rank.device}")
    if main == "float32":
        return ("bf16-mixed", "") if recipe.autocast == "bfloat16" else ("fp32", "")
    if main == "bfloat16":
        return "bf16-master", "guess: weights in bf16; unipar keeps fp32 weights beside them"
    return "fp32", f"to do: the script's weights are {main}"


_OBSERVED_FILE: Final = r"rank-(\d+)\.observed\.json"


def observed_rank_path(folder: Path, rank: int) -> Path:
    """Return the path of what a rank was seen to do."""
    return folder / f"rank-{rank}.observed.json"


def read_observed_ranks(folder: Path) -> Iterator[ObservedRank]:
    """Yield what was observed of each rank, the lowest first; raise ReportError if a file is damaged."""
    numbers = sorted(
        int(m[1]) for file in folder.glob("*.observed.json") if (m := re.fullmatch(_OBSERVED_FILE, file.name))
    )
    for rank in numbers:
        file = observed_rank_path(folder, rank)
        try:
            yield ObservedRank.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as e:
            raise ReportError(
                f"{file} cannot be read as what `unipar observe` saw of a rank ({e}): observe the command again"
            ) from None
