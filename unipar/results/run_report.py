"""`Report`: results of a run, read from the run logs in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from unipar.memory.account import PhasePeak
from unipar.run_folder.layout import PAGE_FILE_NAME, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.notebook import ShownAsPage
from unipar.utils.table import format_table
from unipar.utils.text import count_of, format_duration, format_flops, format_number, format_rate, format_size

if TYPE_CHECKING:
    from torch import nn

    from unipar.task import Task
    from unipar.utils.address import Location

_EVENT_KEYS = ("event", "time", "step")

SPEED_NAMES = (
    "samples_per_second",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
    "waiting",
    "graph_breaks",
    "recompiles",
)
"""Names of what a step did, in step events."""


@dataclass(frozen=True, kw_only=True)
class Report(ShownAsPage):
    """Results of a run, finished or not: what its ranks have logged. It prints as a few lines of text.

    Examples:
        >>> report = unipar.launch("train.yaml", overrides={"train.steps": 4}, quiet=True)
        >>> [step for step, loss in report.losses]
        [1, 2, 3, 4]
        >>> report.load().weight.shape
        torch.Size([1, 1])
    """

    out: Path
    """The run folder."""

    strategy: str
    """Name of the strategy: backend and what is sharded."""

    size: int
    """Number of ranks."""

    parameters: int
    """Number of parameters of the model."""

    steps: int
    """Optimizer steps taken, as far as the run log knows."""

    losses: list[tuple[int, float]]
    """(step, loss of the global batch) of the steps that logged."""

    parts: dict[str, list[tuple[int, float]]]
    """Losses of each part by name, if the model has several parts; `losses` are the sums of the last ones."""

    norms: list[tuple[int, float]]
    """(step, gradient norm before clipping)."""

    rates: list[tuple[int, Any]]
    """(step, learning rate) of the steps that logged; a list if the optimizer's groups have different rates.

    For several parts, a mapping of their names to these.
    """

    evals: list[tuple[int, dict[str, float]]]
    """(step, metric by name) of each evaluation."""

    logs: list[tuple[int, dict[str, Any]]]
    """(step, value by name) of each call of `run.log`."""

    images: list[tuple[int, dict[str, Path]]]
    """(step, file by name) of the images that rank 0 gave to `run.log`."""

    seconds: float
    """Seconds from the first event of rank 0 to its last."""

    peak_rss: list[int]
    """Peak of resident memory of each rank in bytes; empty if the run did not finish."""

    memory: list[tuple[int, list[PhasePeak]]]
    """(step, its phases) of the rank that allocated the most in that step; only with `log.memory`."""

    speed: list[tuple[int, dict[str, float]]]
    """(step, what a step did by name) of the steps that logged, such as `tokens_per_second`, `mfu` and `waiting`."""

    experts: list[tuple[int, dict[str, dict[str, Any]]]]
    """(step, tokens of experts by layer) of the steps that logged, if experts are on several ranks.

    Of each layer `tokens` since the step before, `fullest`, `entropy`, `unused`, `rank` and `microbatch`.
    """

    flops: float | None
    """Operations of forward and backward in one step of the global batch; None if they were not counted."""

    stopped: int | None
    """The step at which a signal or its deadline ended the run."""

    stopped_by: str = "a signal"
    """Cause of its end: a signal, or launch.deadline."""

    make_task: Callable[[], Task] | None = field(default=None, repr=False, compare=False)
    """Function that makes the task for `load`; None: its code is imported as the run's ranks have imported it."""

    @classmethod
    def read(cls, run: Path) -> Self:
        """Return the report of a run folder.

        Args:
            run: The run folder.

        Returns:
            The report, also of a run that is not finished.

        Raises:
            FileNotFoundError: The folder holds no run.
        """
        return cls.of(run, [list(RunLog.read(path)) for path in _find_run_logs(run)])

    @classmethod
    def of(cls, run: Path, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> Self:
        """Return the report of a run from each rank's events, rank 0's first."""
        rows = ranks[0]
        start = next((row for row in reversed(rows) if row["event"] == "start"), {})
        stops = [int(row["step"]) for row in _select_events(rows, "stopped")]
        ends = [int(row["steps"]) for row in _select_events(rows, "end")]
        steps_logged = _select_events(rows, "step")
        steps = [int(row["step"]) for row in steps_logged]
        return cls(
            out=run,
            strategy=str(start.get("strategy", "")),
            size=int(start.get("size", len(ranks))),
            parameters=int(start.get("parameters", 0)),
            steps=max([0, *steps, *stops, *ends]),
            losses=[(int(row["step"]), float(row["loss"])) for row in steps_logged if row.get("loss") is not None],
            parts=_losses_by_part(steps_logged),
            norms=[(int(row["step"]), float(row["norm"])) for row in steps_logged if row.get("norm") is not None],
            rates=[(int(row["step"]), rate) for row in steps_logged if (rate := _rate(row)) is not None],
            evals=[(int(row["step"]), _named_values(row)) for row in _select_events(rows, "eval")],
            logs=[(int(row["step"]), _named_values(row)) for row in _select_events(rows, "log")],
            images=_images_by_step(run, rows),
            seconds=_seconds_of_attempts(rows),
            peak_rss=[
                int(row["peak_rss"]) for events in ranks for row in _select_events(events, "end") if row.get("peak_rss")
            ],
            memory=_largest_memory_by_step(ranks),
            speed=[
                (int(row["step"]), {name: float(row[name]) for name in SPEED_NAMES if name in row})
                for row in steps_logged
                if "samples_per_second" in row
            ],
            experts=[(int(row["step"]), dict(row["experts"])) for row in steps_logged if row.get("experts")],
            flops=next((float(row["flops"]) for row in reversed(steps_logged) if "flops" in row), None),
            stopped=stops[-1] if stops else None,
            stopped_by=next((str(row["why"]) for row in _select_events(rows, "stopped") if row.get("why")), "a signal"),
        )

    @property
    def folder(self) -> Path:
        """The run folder, as an absolute path."""
        return self.out.absolute()

    @property
    def checkpoint(self) -> Location | None:
        """Path, or address, of the run's newest complete checkpoint; None if it has saved none."""
        from unipar.results.trained_model import newest_whole_checkpoint

        checkpoint = newest_whole_checkpoint(self.folder)
        return None if checkpoint is None else checkpoint.path

    def load(self, part: str | None = None, *, averages: bool = False) -> nn.Module:
        """Return the trained model in this process, on the CPU and in evaluation mode, from the newest checkpoint.

        The checkpoint may be of any strategy and number of ranks.

        Args:
            part: Name of the part to return, if `model()` returned several; None: all of them, as a ModuleDict.
            averages: Whether to load the averages of `train.ema` in place of the weights.

        Returns:
            The model.

        Raises:
            CheckpointError: The run has saved nothing.
        """
        from unipar.results.trained_model import import_task_of_run, load_model

        return load_model(
            self.folder, self.make_task or partial(import_task_of_run, self.folder), part, averages=averages
        )

    @override
    def __str__(self) -> str:
        return self.table()

    @property
    @override
    def page(self) -> Path:
        return self.out / PAGE_FILE_NAME

    @override
    def table(self, width: int = 80) -> str:
        """Return the run in a few lines of text."""
        ranks = "one process" if self.size == 1 else f"{self.size} ranks"
        rows = [("strategy", f"{self.strategy}, {ranks}"), ("parameters", f"{self.parameters:,}")]
        how = f", stopped by {self.stopped_by} after step {self.stopped}" if self.stopped is not None else ""
        rows.append(("steps", f"{self.steps}{how}"))
        rows.append(("time", f"{format_duration(self.seconds)} from the first event to the last"))
        series = {f"loss of {name}": losses for name, losses in self.parts.items()} or {"loss": self.losses}
        for name, losses in series.items():
            if losses:
                (first, a), (last, b) = losses[0], losses[-1]
                rows.append((name, f"{a:.4f} at step {first}, {b:.4f} at step {last}"))
        if self.evals:
            step, values = self.evals[-1]
            rows.append(
                ("evaluation", ", ".join(f"{k} {format_number(v)}" for k, v in values.items()) + f" at step {step}")
            )
        if self.speed:
            rows.append(("speed", _describe_speed(*self.speed[-1])))
        if self.experts:
            rows.append(("experts", describe_experts(*self.experts[-1])))
        if self.peak_rss:
            rows.append(("peak RSS", f"{format_size(max(self.peak_rss))} on the largest rank"))
        if self.memory:
            step, phases = self.memory[-1]
            fullest = max(phases, key=lambda phase: phase.peak)
            rows.append(
                ("memory", f"{format_size(fullest.peak)} in the {fullest.name} of step {step}, on the largest rank")
            )
        rows.append(("folder", str(self.out)))
        header, *rest = rows
        return format_table(header, rest, width=width)


def _describe_speed(step: int, named: Mapping[str, float]) -> str:
    """Return what the last logged steps did, in one line."""
    unit = "tokens" if "tokens_per_second" in named else "samples"
    parts = [f"{format_rate(named[f'{unit}_per_second'])} {unit}/s"]
    if "flops_per_second" in named:
        parts.append(f"{format_flops(named['flops_per_second'])}/s")
    if "mfu" in named:
        parts.append(f"MFU {named['mfu']:.1%}")
    for name, one in (("graph_breaks", "graph break"), ("recompiles", "recompile")):
        if name in named:
            parts.append(count_of(int(named[name]), one))
    return f"{', '.join(parts)} at step {step}"


def describe_experts(step: int, layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how uneven the tokens of experts were, in one line."""
    name, most = max(layers.items(), key=lambda layer: layer[1]["fullest"])
    rank, unused = max(layer["rank"] for layer in layers.values()), sum(layer["unused"] for layer in layers.values())
    text = f"the fullest got {most['fullest']:.2f} times an even share ({name}), the fullest rank {rank:.2f} times"
    none = f", {count_of(unused, 'expert')} got no token" if unused else ""
    return f"{text}{none} at step {step}"


def _find_run_logs(run: Path) -> list[Path]:
    """Return the paths of every rank's run log, rank 0 first."""
    run_logs = sorted(run.glob("rank-*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank-")))
    if not run_logs or run_logs[0] != run_log_path(run, 0):
        raise FileNotFoundError(f"{run} holds no run: there is no {run_log_path(run, 0).name} in it")
    return run_logs


def _select_events(rows: Iterable[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["event"] == event]


def _rate(row: Mapping[str, Any]) -> Any:
    """Return the learning rate in the row of a step, or each part's; None if it has none."""
    if "parts" in row:
        return {name: part["lr"] for name, part in row["parts"].items() if "lr" in part}
    return row.get("lr")


def _losses_by_part(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return each part's losses at its own steps; a step that is in two rows counts once."""
    by_part: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, part in row.get("parts", {}).items():
            by_part.setdefault(name, {})[int(part["step"])] = float(part["loss"])
    return {name: sorted(losses.items()) for name, losses in by_part.items()}


def _largest_memory_by_step(ranks: Iterable[Iterable[Mapping[str, Any]]]) -> list[tuple[int, list[PhasePeak]]]:
    peaks_of_step: dict[int, list[PhasePeak]] = {}
    for rows in ranks:
        for row in rows:
            if row["event"] != "step" or not row.get("memory"):
                continue
            phases = [PhasePeak.model_validate(phase) for phase in row["memory"]]
            before = peaks_of_step.get(int(row["step"]), ())
            if max(p.peak for p in phases) > max((p.peak for p in before), default=-1):
                peaks_of_step[int(row["step"])] = phases
    return sorted(peaks_of_step.items())


def _images_by_step(run: Path, rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, dict[str, Path]]]:
    images: dict[int, dict[str, Path]] = {}
    for row in _select_events(rows, "image"):
        images.setdefault(int(row["step"]), {})[str(row["name"])] = run / str(row["file"])
    return sorted(images.items())


def _seconds_of_attempts(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the time from the first event to the last, without that between two attempts."""
    return sum(b["time"] - a["time"] for a, b in pairwise(rows) if b["event"] != "continued")


def _named_values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in _EVENT_KEYS}
