"""`Recipe`: how an observed script makes its training, as far as one process shows it."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from unipar.config import Section


class _Seen(Section):
    """Base class: a script's numbers may be infinite, as a limit that only measures a norm."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")


class CodePlace(_Seen):
    """Line of a file."""

    file: str
    line: int
    function: str = ""
    """Function that the line is in; <module>: none."""


class SeenObject(_Seen):
    """Object of the script, and what is known of how it is made again."""

    name: str
    """Its class; of a function its own name."""

    module: str
    file: str = ""
    """File of that class or function; empty if it is in none."""

    expression: str = ""
    """Python that makes it with the arguments that were seen; empty if they are not known."""

    imports: dict[str, str] = Field(default_factory=dict)
    """Module of each name in the expression."""

    files: dict[str, str] = Field(default_factory=dict)
    """File of each of these modules."""

    unknown: tuple[str, ...] = ()
    """Arguments whose values cannot be written as Python, each with its class."""

    made: CodePlace | None = None
    """Line that called the constructor."""

    variable: str = ""
    """Variable of the script that holds it."""


class SeenLoader(_Seen):
    """DataLoader from which the script trains."""

    dataset: SeenObject
    wrapped_in: tuple[str, ...] = ()
    """Classes around the dataset, such as Subset."""

    collate: SeenObject | None = None
    """Function that makes batches; None: PyTorch's own."""

    batch_size: int | None = None
    shuffle: bool | None = None
    """Whether the order is drawn at random; None: a sampler of the script's own decides."""

    workers: int = 0
    drop_last: bool = False
    samples: int | None = None
    """Length of the dataset."""


class SeenOptimizer(_Seen):
    """Optimizer as the script made it."""

    name: str
    module: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of its first group, without the present rate if a schedule has changed it."""

    groups: tuple[dict[str, Any], ...] = ()
    """Settings in which each group differs from the first one."""

    decay: str = "all"
    """Parameters that decay, as `train.optimizer.decay` says it; own: some other choice."""

    weights: int = 0
    """Number of tensors that it updates."""


class SeenSchedule(_Seen):
    """Schedule of the learning rate that is an object of torch."""

    name: str
    numbers: dict[str, float] = Field(default_factory=dict)
    """Its settings that are numbers, and the rates of the optimizer's first group that it goes by."""

    functions: tuple[str, ...] = ()
    """Names of the functions that give the rate."""


class SeenLoss(_Seen):
    """Line on which the script calls backward for the first time."""

    place: CodePlace
    models: tuple[str, ...] = ()
    """Variables there that hold the model or its wrapper."""

    others: tuple[str, ...] = ()
    """Variables there that hold further models."""

    callers: tuple[CodePlace, ...] = ()
    """Lines from which the function of that line was called, the innermost first."""


class Recipe(_Seen):
    """Making of a script's training: model, data, optimizer, schedule and loss."""

    script: str = ""
    """File that Python was started with."""

    model: SeenObject | None = None
    pretrained: bool = False
    """Whether the model was filled by from_pretrained."""

    frozen: int = 0
    """Number of parameters that are not trained."""

    sync_batchnorm: bool = False
    compiled: str = ""
    """Parts that are compiled: blocks or model."""

    recompute: bool = False
    wrappers: tuple[str, ...] = ()
    """Classes around the model, as users name them, the outermost first."""

    backend: str = ""
    """Backend of unipar whose library wraps the model or calls the optimizer; empty: none."""

    library_config: dict[str, Any] = Field(default_factory=dict)
    """The library's own config, as `unipar import` reads it."""

    mesh: tuple[int, ...] = ()
    """Sizes of the device mesh on which weights are split; empty without one."""

    optimizers: tuple[SeenOptimizer, ...] = ()
    schedules: tuple[SeenSchedule, ...] = ()
    loader: SeenLoader | None = None
    batch_keys: tuple[str, ...] = ()
    """Keys of a batch that is a mapping."""

    loss: SeenLoss | None = None
    arguments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Plain values in the namespaces that argparse makes, by the script's variable."""

    autocast: str = ""
    """Dtype of autocast, or of a wrapper's mixed precision."""

    loss_scaling: bool = False
    norm_type: float = 2.0
    """Kind of norm that the clip limits."""

    seed: int | None = None
    """Seed of PyTorch when the model was made; None: one that PyTorch has drawn."""
