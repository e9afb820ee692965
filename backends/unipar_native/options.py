"""Section options.native of the config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from unipar_mesh.options import MeshOptions

from unipar.config import Config


class NativeOptions(MeshOptions):
    """Section options.native of the config."""

    find_unused_parameters: bool | Literal["auto"] = "auto"
    """DDP's search for parameters that the loss does not use. auto: the first step shows whether it is needed;
    true: at every step, for a model that uses other parameters at other times; false: never."""

    bucket_cap_mb: PositiveInt = 25
    """DDP's bucket size in MiB: how much gradient is reduced at once."""

    static_graph: bool = False
    """Whether DDP may count on the same graph in every step: its reductions overlap more, and a parameter that the loss
    uses several times needs no search. The first step shows which parameters are never used."""

    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How DDP sends gradients: as they are; rounded to half precision; or as products of two thin matrices, whose error
    is added to the next step's gradient. Losses then agree with one process to fewer digits, which compare shows."""

    powersgd_rank: PositiveInt = 1
    """Columns of PowerSGD's matrices: more send more, and lose less."""

    powersgd_start: Annotated[int, Field(ge=2)] = 1000
    """First step in which PowerSGD compresses, counted from DDP's own first, which is the second of the run."""

    wrapper: Literal["auto", "dp"] = "auto"
    """auto: DDP or FSDP2, by what is split; dp: nn.DataParallel, one process over all its CUDA devices."""


def options_of(config: Config) -> NativeOptions:
    """Return options.native of the config."""
    return NativeOptions.model_validate(config.options.get("native", {}))
