"""`Config` and its small sections: task, data, eval, log, launch, compare."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from unipar.config.sections.batch import Batch
from unipar.config.sections.checkpoint import Checkpoint
from unipar.config.sections.duration import Seconds
from unipar.config.sections.machines import Machines
from unipar.config.sections.model import Model
from unipar.config.sections.parallel import Parallel
from unipar.config.sections.section import Section
from unipar.config.sections.train import Train
from unipar.utils.address import is_address, parse_address


class TaskUse(Section):
    """Config section `task`."""

    use: str | None = None
    """`file.py:Class`, relative to this file, or `package.module:Class`; null: a script passes `task=`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that class."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.use is None and not self.args:
            raise ValueError("use is missing: write file.py:Class, or give args for the class that a script passes")
        return self


class Data(Section):
    """Config section `data`."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Processes on each rank that fetch samples; 0: the training process fetches them."""

    shuffle: bool = True
    """Whether each epoch has a new order, which depends only on `train.seed` and the epoch."""

    last_batch: Literal["keep", "drop", "error"] = "keep"
    """Treatment of an epoch's last batch if it is not full. keep: use it, each sample weighted as in a full batch;
    drop: leave it out; error: raise an error."""

    stream: Literal["whole", "shards", "own"] = "whole"
    """Division of an IterableDataset among ranks. whole: every rank reads all and takes its own samples; shards: each
    rank reads the part that shard(index, count) gives; own: the dataset splits itself by rank and worker."""


class EarlyStopRule(Section):
    """Config section `eval.stop`."""

    metric: str = "loss"
    """Name of a metric of the evaluation."""

    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value is an improvement."""

    patience: PositiveInt = 3
    """Number of successive evaluations without an improvement after which the run ends."""


class Eval(Section):
    """Config section `eval`."""

    every: PositiveInt | None = None
    """Optimizer steps between evaluations; null: no evaluations."""

    batches: PositiveInt | None = None
    """Number of batches of `batch.total` samples that an evaluation reads; null: all."""

    check: bool = True
    """Whether the first evaluation of a run checks that the numbers of the task's metrics() are means: those of a batch
    must be the means of those of its halves."""

    stop: EarlyStopRule | None = None
    """End of the run before its last step if a metric no longer improves; null: no early stop."""

    @model_validator(mode="after")
    def _stop_is_decided(self) -> Self:
        if self.stop is not None and self.every is None:
            raise ValueError("stop is decided after evaluations, and there are none; give every, or leave stop out")
        return self


MOST_TRACED_STEPS: Final = 50
"""Largest number of steps in a trace, which holds every operator of each of them."""


class Trace(Section):
    """Config section `log.trace`: a trace of some steps by torch.profiler."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
    """First and last step of the trace, as numbers of the training: [10, 12] are three steps."""

    ranks: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] = (0,)
    """Ranks that write a trace, each into trace/rank-N.json.gz of the run folder."""

    @field_validator("steps")
    @classmethod
    def _are_steps(cls, steps: tuple[int, int]) -> tuple[int, int]:
        first, last = steps
        if first > last:
            raise ValueError(f"the first step ({first}) is after the last one ({last}): write [{last}, {first}]")
        if last - first >= MOST_TRACED_STEPS:
            raise ValueError(
                f"{first} to {last} are {last - first + 1} steps, and a trace of more than {MOST_TRACED_STEPS} is too "
                f"large to be opened: write [{first}, {first + 2}]"
            )
        return steps

    @property
    def numbers(self) -> range:
        """Numbers of the traced steps."""
        return range(self.steps[0], self.steps[1] + 1)


class Log(Section):
    """Config section `log`."""

    every: PositiveInt = 10
    """Optimizer steps between logged steps."""

    to: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Trackers that get the metrics besides the run folder: tensorboard, wandb, mlflow, or a plugin."""

    memory: bool = False
    """Whether memory is recorded in logged steps: what each rank allocates in each phase, and for what."""

    trace: Trace | None = None
    """Trace of some steps, for Perfetto, and its ten largest entries as text (`unipar trace`); null: none."""


class Launch(Section):
    """Config section `launch`."""

    heartbeat: Seconds | None = 60.0
    """Seconds without a heartbeat after which a rank counts as hung; null: never."""

    timeout: Seconds = 120.0
    """Seconds that a collective may wait for its peers; always more than `heartbeat`."""

    rendezvous_timeout: Seconds = 600.0
    """Seconds in which ranks on several machines must find each other."""

    shutdown_timeout: Seconds = 30.0
    """Seconds that a run may take to reach a step boundary after a signal; a save in progress may take longer."""

    deadline: Seconds | None = None
    """Seconds after which the run saves and stops at a step boundary; null: never."""

    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of times that unipar's own launcher starts a failed run again from its newest complete checkpoint."""

    fork: bool = True
    """Whether processes on the CPU are forks of one process that has imported the libraries; false: each imports
    them."""

    @model_validator(mode="after")
    def _peers_wait_longer(self) -> Self:
        if self.heartbeat is not None and self.timeout <= self.heartbeat:
            raise ValueError(
                f"timeout ({self.timeout:g}) must be larger than heartbeat ({self.heartbeat:g}), "
                "otherwise the ranks that wait would be blamed before the one that hangs"
            )
        return self


class Compare(Section):
    """Config section `compare`."""

    strategies: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*",)
    """Strategies to compare: names, `backend/*` for all of one backend, `*` for all. `single` always runs."""

    repeat: PositiveInt = 3
    """Timed rounds; the strategies take turns in each."""

    memory: bool = True
    """Whether memory is recorded in some steps before the timed ones (what each rank allocates, and for what), and
    predicted when all strategies have ended."""


class Config(Section):
    """Config of a run: what is trained, how it is split, and which backend trains it.

    Examples:
        >>> config = unipar.Config(batch={"total": 16}, train={"steps": 8})
        >>> config.train.optimizer.name, config.batch.settle(ranks=2).micro
        ('adamw', 8)
    """

    task: TaskUse | None = None
    """The task to train; a script may give it to `launch` instead."""

    backend: str = "native"
    """Backend that trains: native, deepspeed, horovod, accelerate, single, or a plugin."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?)$")] = "auto"
    """auto, cpu, cuda, xpu, npu, hpu, mps, or one device such as cuda:0, which several ranks may share. auto: the
    machine's accelerator, or the CPU; never mps, which is one process. AMD's GPUs are cuda."""

    parallel: Parallel = Parallel()
    """Number of processes, and what they split."""

    batch: Batch
    """Number of samples in a step, and how they are divided."""

    model: Model = Model()
    """Settings of the model itself."""

    data: Data = Data()
    """Reading of samples."""

    train: Train
    """Length of the training, optimizer, schedule and precision."""

    eval: Eval = Eval()
    """Evaluation on the validation data."""

    log: Log = Log()
    """Metrics to write, and how often."""

    checkpoint: Checkpoint | None = None
    """When the state is saved, where, and how many checkpoints are kept; null: nothing is saved."""

    resume: str | None = None
    """Checkpoint to continue from: its path or address. auto: the newest complete checkpoint of the newest run of this
    name; never: start anew; null: never for a start by hand, auto for a restart by a launcher."""

    @field_validator("resume")
    @classmethod
    def _names_a_place(cls, resume: str | None) -> str | None:
        return str(parse_address(resume)) if resume is not None and is_address(resume) else resume

    launch: Launch = Launch()
    """Time limits, restarts and start of the processes of a run. A time is a number of seconds, or text such as 90s,
    30m or 3h50m; at most 30 days."""

    machines: Machines | None = None
    """Several machines: how many, and the job system that starts the run there; null: this machine alone."""

    def ranks_of_machine(self, ranks: int) -> int | None:
        """Return how many of the ranks a machine has, by section `machines`; None: it does not say."""
        if self.machines is None:
            return None
        if self.machines.ranks_per_node != "auto":
            return self.machines.ranks_per_node
        return -(-ranks // self.machines.nodes) if self.machines.nodes > 1 else None

    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of each backend, by its name. All are checked; only those of `backend` are used."""

    compare: Compare = Compare()
    """Settings of `unipar compare`."""

    @model_validator(mode="after")
    def _evaluates_one_model(self) -> Self:
        between, steps = self.train.local_steps, self.eval.every
        if between is not None and steps is not None and steps % between:
            raise ValueError(
                f"eval.every ({steps}) is not a multiple of train.local_steps ({between}): between two "
                "synchronizations each rank has a different model"
            )
        return self

    out: str | None = None
    """The run folder, relative to the working directory; null: runs/NAME, where NAME is the config's file name without
    .yaml, or for a further run runs/NAME-2, runs/NAME-3, ..."""

    def of_part(self, name: str) -> Config:
        """Return the config with the optimizer and the clip of one part of the model."""
        own = self.train.parts.get(name)
        if own is None:
            return self
        changes = {key: value for key in ("optimizer", "clip") if (value := getattr(own, key)) is not None}
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def on_device(self, device: str) -> Config:
        """Return the config with a device that was chosen, so that nobody chooses another."""
        return self if self.device == device else self.model_copy(update={"device": device})

    def json_for_ranks(self) -> str:
        """Return JSON for the ranks of a run, without keys of `data` that were not set: a DataLoader may set them."""
        values = self.model_dump(mode="json")
        return json.dumps(values | {"data": self.data.model_dump(mode="json", exclude_unset=True)}, indent=2)
