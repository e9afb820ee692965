"""What a run is, said without naming any library: read it top to bottom."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from typing_extensions import override

from unipar.errors import ConfigError
from unipar.model import Model
from unipar.training import AdamW, Clip, Constant, LrScale, Optimizer, Schedule, Section

Shard = Literal["nothing", "optimizer", "gradients", "parameters"]
SHARDS: tuple[Shard, ...] = ("nothing", "optimizer", "gradients", "parameters")
Precision = Literal["fp32", "fp64", "fp16", "bf16-mixed", "bf16-master"]

NOT_YET = {
    "parallel.tensor": "tensor parallelism is not there yet",
    "parallel.pipeline": "pipeline parallelism is not there yet",
    "parallel.context": "context parallelism is not there yet",
}
"""Keys of the design that this version refuses by name, so that none is without effect."""


@dataclass(frozen=True)
class Cell:
    """Who trains and what is split: `native/parameters`, `deepspeed/gradients+library`, `single`."""

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
        return str(self).replace("/", "-")

    @classmethod
    def parse(cls, text: str) -> Self:
        head, _, variant = text.partition("+")
        backend, slash, shard = head.partition("/")
        if not backend or (slash and shard not in SHARDS) or text.endswith("+"):
            raise ConfigError(
                f"{text!r} is not a cell: write backend/shard or backend/shard+variant, "
                f"where shard is one of {', '.join(SHARDS)} (a bare backend means /nothing)"
            )
        return cls(backend, shard if shard in SHARDS else "nothing", variant or None)


class TaskUse(Section):
    use: str
    """`file.py:Class`, relative to this file, or `package.module:Class`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that class."""


class Parallel(Section):
    data: PositiveInt | Literal["auto"] = "auto"
    """Ranks that see different data. auto: the world found, or all visible GPUs, or 1."""

    shard: Shard = "nothing"
    """What those ranks split among themselves instead of each holding a copy."""

    shard_over: Annotated[int, Field(ge=2)] | None = None
    """How many neighbouring ranks split one copy; the other ranks hold further copies. All of them without it."""

    def settle(self, ranks: int) -> None:
        """Refuse a number of ranks that copies do not fill; an error shows the arithmetic."""
        if self.shard_over is not None and ranks % self.shard_over:
            raise ConfigError(
                f"parallel.shard_over ({self.shard_over}) does not divide the number of ranks ({ranks}): give a "
                "divisor of it, or leave shard_over out, and all ranks split one copy"
            )


@dataclass(frozen=True)
class Sizes:
    """A batch whose three numbers are settled: total = micro x accumulate x ranks."""

    total: int
    micro: int
    accumulate: int
    ranks: int


class Batch(Section):
    """Any two of the three numbers give the third; `total` alone means accumulate 1."""

    total: PositiveInt | None = None
    """Samples in one optimizer step, over all ranks."""

    micro: PositiveInt | None = None
    """Samples in one forward pass on one rank."""

    accumulate: PositiveInt | None = None
    """Forward passes on one rank in one optimizer step."""

    @model_validator(mode="after")
    def _two_numbers(self) -> Self:
        if self.total is None and (self.micro is None or self.accumulate is None):
            given = {k: v for k, v in (("micro", self.micro), ("accumulate", self.accumulate)) if v}
            said = ", ".join(f"{k}: {v}" for k, v in given.items()) or "none"
            raise ValueError(f"two of total, micro and accumulate are needed (or total alone); given: {said}")
        return self

    def settle(self, ranks: int) -> Sizes:
        """The three numbers in a world of `ranks`; an error shows the arithmetic."""
        total, micro, accumulate = self.total, self.micro, self.accumulate
        if total is None:
            assert micro is not None
            assert accumulate is not None
            return Sizes(micro * accumulate * ranks, micro, accumulate, ranks)
        if micro is None:
            accumulate = accumulate or 1
            if total % (accumulate * ranks):
                raise ConfigError(
                    f"batch.total ({total}) is not a multiple of accumulate x data "
                    f"({accumulate} x {ranks} = {accumulate * ranks})" + _nearest(total, accumulate * ranks)
                )
            return Sizes(total, total // (accumulate * ranks), accumulate, ranks)
        if total % (micro * ranks):
            raise ConfigError(
                f"batch.total ({total}) is not a multiple of micro x data "
                f"({micro} x {ranks} = {micro * ranks})" + _nearest(total, micro * ranks)
            )
        if accumulate is not None and total != micro * accumulate * ranks:
            raise ConfigError(
                f"batch.total ({total}) is not micro x accumulate x data ({micro} x {accumulate} x {ranks} = "
                f"{micro * accumulate * ranks}); leave one of the three out"
            )
        return Sizes(total, micro, total // (micro * ranks), ranks)


def _nearest(total: int, step: int) -> str:
    near = [n for n in (total // step * step, (total // step + 1) * step) if n]
    return f"; the nearest totals are {' and '.join(map(str, near))}" if len(near) > 1 else f"; the least is {step}"


class Data(Section):
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes on each rank that fetch samples; 0: the training process does."""

    shuffle: bool = True
    """A new order each epoch, from `train.seed` and the epoch alone."""

    ragged: Literal["weigh", "drop", "error"] = "weigh"
    """An epoch's last batch when it is not full: weigh each sample as ever, drop it, or refuse."""

    stream: Literal["whole", "shards", "own"] = "whole"
    """An IterableDataset. whole: every rank reads it all and takes its own samples; shards: each rank reads
    the part that shard(index, count) gives; own: the dataset splits itself by rank and worker."""


class PartTrain(Section):
    """train.parts.NAME: what one of several parts has of its own."""

    optimizer: Optimizer | None = None
    """Instead of train.optimizer."""

    clip: PositiveFloat | Clip | None = None
    """Instead of train.clip."""


class Train(Section):
    steps: PositiveInt | None = None
    """Optimizer steps to train for."""

    epochs: PositiveInt | None = None
    """Or passes over the data."""

    optimizer: Optimizer = AdamW()
    """sgd, adam or adamw, with its own keys."""

    lr_scale: LrScale = LrScale()
    """How the rate follows the total batch."""

    schedule: Schedule = Constant()
    """constant, linear or cosine; counted in optimizer steps, everywhere."""

    clip: PositiveFloat | Clip | None = None
    """The largest gradient norm, or {max: 1.0, norm: fp64}."""

    parts: dict[str, PartTrain] = Field(default_factory=dict)
    """Where model() returns several parts: by name, an optimizer and a clip of their own."""

    sync_every: PositiveInt | None = None
    """Each rank steps by itself, and every so many steps all take their mean; gradients are summed at every step
    without it."""

    precision: Precision = "fp32"
    """bf16-mixed computes in bf16 on fp32 parameters; bf16-master keeps bf16 parameters with fp32 masters."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Initial weights, the order of the data and every random draw follow from it."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("one of steps and epochs is needed, and not both")
        return self

    @model_validator(mode="after")
    def _same_scale(self) -> Self:
        if self.sync_every is not None and self.precision == "fp16":
            raise ValueError(
                f"sync_every ({self.sync_every}) and fp16 exclude each other: each rank would leave out other steps; "
                "use bf16-mixed"
            )
        return self

    @model_validator(mode="after")
    def _full_rate(self) -> Self:
        warmup = self.schedule.warmup
        if self.steps is not None and warmup > self.steps:
            raise ValueError(
                f"schedule.warmup ({warmup}) is more than steps ({self.steps}), so the rate would never reach its full "
                "value; give a shorter warmup (train.schedule.warmup: 0), or more steps"
            )
        return self

    @property
    def clipping(self) -> Clip | None:
        return Clip(max=self.clip) if isinstance(self.clip, float | int) else self.clip


class Eval(Section):
    every: PositiveInt | None = None
    """Optimizer steps between evaluations; none without it."""

    batches: PositiveInt | None = None
    """How many batches of `batch.total` samples an evaluation reads; all without it."""


class Log(Section):
    every: PositiveInt = 10
    """Optimizer steps between logged ones."""

    to: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Where metrics go besides the run folder's JSON lines: tensorboard, wandb, mlflow, or a plugin."""

    memory: bool = False
    """Whether the steps that log are watched: what each rank allocates in each phase, and what for."""


Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""Of patience, up to 30 days: timers of some libraries overflow beyond."""


class Launch(Section):
    heartbeat: Seconds | None = 60.0
    """Seconds without a sign of life from a training rank after which it counts as hung; null: never."""

    timeout: Seconds = 120.0
    """Seconds a collective may wait for its peers; always more than heartbeat."""

    grace: Seconds = 30.0
    """Seconds that a run has to reach a step boundary on a signal."""

    @model_validator(mode="after")
    def _peers_wait_longer(self) -> Self:
        if self.heartbeat is not None and self.timeout <= self.heartbeat:
            raise ValueError(
                f"timeout ({self.timeout:g}) must be larger than heartbeat ({self.heartbeat:g}), "
                "else the ranks that wait are blamed before the one that hangs"
            )
        return self


class Compare(Section):
    cells: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*",)
    """What to compare: cells, `backend/*` for all of one backend, `*` for all. `single` always runs."""

    repeat: PositiveInt = 3
    """Timed rounds; the cells take turns in each."""

    memory: bool = True
    """Whether some steps before the timed ones are watched: what each rank allocates, and what for."""


class Config(Section):
    """One run: what is trained, what is split and who does it."""

    task: TaskUse | None = None
    """The task to train; a script may give it to `launch` instead."""

    backend: str = "native"
    """Who does it: native, deepspeed, horovod, accelerate, single, or a plugin."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto, cpu, cuda, or cuda:N, which several ranks may share. auto: CUDA where there is any."""

    parallel: Parallel = Parallel()
    """How many processes, and what they split."""

    batch: Batch
    """How many samples in a step, and how they are cut."""

    model: Model = Model()
    """What is said about the model itself."""

    data: Data = Data()
    """How samples are read."""

    train: Train
    """How long, and by which rule."""

    eval: Eval = Eval()
    """When to look at the validation data."""

    log: Log = Log()
    """What is written down, and when."""

    launch: Launch = Launch()
    """Patience with the processes of the run."""

    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By backend, its own settings; all are checked, those of `backend` are used."""

    compare: Compare = Compare()
    """What `unipar compare` runs."""

    @model_validator(mode="after")
    def _one_model_to_look_at(self) -> Self:
        between, steps = self.train.sync_every, self.eval.every
        if between is not None and steps is not None and steps % between:
            raise ValueError(
                f"eval.every ({steps}) is not a multiple of train.sync_every ({between}): in between, each rank holds "
                "another model"
            )
        return self

    out: str | None = None
    """The run folder, relative to the working directory; runs/NAME without it, NAME the config's."""

    def of_part(self, name: str) -> Config:
        """The same run as one of its parts sees it."""
        own = self.train.parts.get(name)
        if own is None:
            return self
        said = {key: value for key in ("optimizer", "clip") if (value := getattr(own, key)) is not None}
        return self.model_copy(update={"train": self.train.model_copy(update=said)})

    def written(self) -> str:
        """As JSON for the ranks of a run, less keys of `data` that nobody said: a DataLoader may say them."""
        whole = self.model_dump(mode="json")
        return json.dumps(whole | {"data": self.data.model_dump(mode="json", exclude_unset=True)}, indent=2)
