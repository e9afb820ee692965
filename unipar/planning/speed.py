"""Seconds of a step on a machine: arithmetic, the update, communication and how much of it is hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unipar.config import Precision
from unipar.config.sections.strategy import Axes
from unipar.planning.machines.machine import Machine, hops
from unipar.planning.pipeline_order import bubble
from unipar.prediction.timeline import CommVolume, OverlapWindow

BACKWARD_SHARE: Final = 2 / 3
"""Share of forward and backward that is backward: gradients of inputs and of weights, each as long as a forward."""


@dataclass(frozen=True)
class StepWork:
    """Work of one rank in a step."""

    flops: float
    """Operations of all its microbatches, recomputed ones included."""

    model_flops: float
    """The same without those that are computed again."""

    operations: int
    """Number of operations (kernels) of all its microbatches."""

    update_bytes: float
    """Bytes that the update reads and writes."""

    units: float
    """Samples, or what the task's weight counts, of the whole world."""

    microbatches: int = 1


@dataclass(frozen=True)
class StepSpeed:
    """Predicted seconds of a step."""

    compute: float
    """Forward and backward of all microbatches."""

    update: float
    communication: float
    """All collectives, one after another."""

    hidden: float
    """Those of them beside which the rank computes."""

    waiting: float
    """Seconds in which a rank waits for the stages of a pipeline before and behind it."""

    units: float
    """Samples, or what the task's weight counts, of a step."""

    mfu: float
    """Share of the device's peak that the model's own operations reach."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.waiting + self.update + self.communication - self.hidden

    @property
    def rate(self) -> float:
        """Samples, or what the task's weight counts, a second."""
        return self.units / self.seconds


def predict_speed(
    machine: Machine,
    precision: Precision,
    work: StepWork,
    sent: Sequence[CommVolume],
    overlaps: Mapping[str, OverlapWindow],
    axes: Axes,
    ranks: int,
) -> StepSpeed | None:
    """Return the seconds of a step of this many ranks; None if the machine has no known peak in this precision.

    `overlaps`: collectives along the data's axis beside which the library lets the rank compute, and during what.
    """
    peak = machine.peak(precision)
    if peak is None:
        return None
    arithmetic = work.flops / (peak * machine.reached_in(precision))
    started = work.operations * machine.operation
    compute = arithmetic + started if machine.device == "cpu" else max(arithmetic, started)
    share = bubble(axes.schedule, axes.pipeline, work.microbatches) if axes.pipeline > 1 else 0.0
    times = [(volume, seconds_of(volume, machine, axes, ranks)) for volume in sent]
    speed = StepSpeed(
        compute=compute,
        update=work.update_bytes / machine.bandwidth,
        communication=sum(seconds for _, seconds in times),
        hidden=_hidden(times, overlaps, compute, work.microbatches) * machine.hides,
        waiting=compute * share / (1.0 - share),
        units=work.units,
        mfu=0.0,
    )
    return StepSpeed(**{**vars(speed), "mfu": work.model_flops / (peak * speed.seconds)})


def seconds_of(volume: CommVolume, machine: Machine, axes: Axes, ranks: int) -> float:
    """Return the seconds of a collective's calls: latencies along a tree, bytes over a ring's slowest link."""
    link = machine.way(axes, volume.axis, volume.ranks, ranks, volume.stride)
    bandwidth = link.bandwidth * link.shares.get(volume.collective, 1.0)
    moved = volume.size * bytes_on_the_way(volume.collective, volume.ranks)
    return volume.calls * link.latency * hops(volume.ranks) + moved / bandwidth


def bytes_on_the_way(collective: str, ranks: int) -> float:
    """Return how many times its bytes one rank of a ring sends; the bytes are those of the whole tensor."""
    if ranks < 2:
        return 0.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


def _hidden(
    times: Sequence[tuple[CommVolume, float]], overlaps: Mapping[str, OverlapWindow], compute: float, microbatches: int
) -> float:
    """Return the seconds of collectives beside which there is something to compute; narrow windows first."""
    backward = compute * BACKWARD_SHARE
    left: dict[OverlapWindow, float] = {
        "last backward": backward / microbatches,
        "backward": backward,
        "step": compute,
    }
    hidden = 0.0
    for window in left:
        wanted = sum(
            seconds for p, seconds in times if p.axis.startswith("data") and overlaps.get(p.collective) == window
        )
        hidden += min(wanted, left[window] - hidden)
    return hidden


def describe_speed(speed: StepSpeed) -> str:
    """Return the parts of a step's seconds in words, largest first."""
    parts = {
        "computing": speed.compute,
        "communication that is not hidden": speed.communication - speed.hidden,
        "update": speed.update,
        "waiting for other stages": speed.waiting,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / speed.seconds:.0%}" for name, seconds in ordered if seconds)
