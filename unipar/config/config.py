"""`Config` and its small sections: task, data, eval, log, launch, compare."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from unipar.config.section import Section
from unipar.config.sections.batch import Batch
from unipar.config.sections.model import Model
from unipar.config.sections.parallel import Parallel
from unipar.config.sections.train import Train


class TaskUse(Section):
    use: str
    """`file.py:Class`, relative to this file, or `package.module:Class`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that class."""


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

    def json_for_ranks(self) -> str:
        """As JSON for the ranks of a run, less keys of `data` that nobody said: a DataLoader may say them."""
        whole = self.model_dump(mode="json")
        return json.dumps(whole | {"data": self.data.model_dump(mode="json", exclude_unset=True)}, indent=2)
