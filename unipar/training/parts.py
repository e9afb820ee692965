"""The parts of a run, mostly one: each module that `model()` returned, its engine, and what its steps gave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from unipar.backend import Engine, Part, Piece, Read, Step
from unipar.config import Config
from unipar.distributed.world import World
from unipar.errors import NonFinite, UniparError
from unipar.training import stopping

_MAX_PENDING_LOSSES = 64
"""Losses that are kept one by one before they are copied into the window."""


@final
class TrainedPart:
    """One part: its module and engine, and the losses of its steps that are not yet reported."""

    def __init__(self, part: Part, engine: Engine, config: Config, world: World, *, alone: bool) -> None:
        self.name, self.module, self.engine, self.world = part.name, part.module, engine, world
        self.config = config
        """With this part's own optimizer and clip."""

        self.error_suffix = "" if alone else f" of {part.name!r}"
        """How errors tell it from others."""

        self._names = frozenset(n for n, p in part.module.named_parameters() if p.requires_grad)
        self.window = torch.zeros(config.log.every, dtype=torch.float64, device=world.device)
        self.skipped = 0
        """Updates that fp16's loss scale left out."""

        self.steps: list[int] = []
        """Of the run, from 1: those whose losses fill the window."""

        self.last: dict[str, Any] | None = None
        """Step, loss, norm and rate that were reported last."""

        self._pending_losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._rate = 0.0
        self._loss_and_norm: Tensor | None = None
        self._step_numbers: list[int] = []

    def set_trainable(self, wanted: bool) -> None:
        """Whether its parameters take gradients; by name, as libraries put other tensors in their places."""
        self.engine.before_state_access()
        for name, p in self.module.named_parameters():
            if name in self._names:
                p.requires_grad_(wanted)

    def add_step(self, number: int, out: Step, rate: float) -> None:
        """Keep what the run's step `number` gave, on the device."""
        self.steps.append(number)
        self._pending_losses.append(out.loss)
        self._norm, self._rate = out.norm, rate
        if len(self._pending_losses) == _MAX_PENDING_LOSSES:
            self.settle()
        if self._loss_and_norm is not None:
            self._loss_and_norm[0, len(self._step_numbers)] = out.loss
            self._loss_and_norm[1, len(self._step_numbers)] = out.norm
            self._step_numbers.append(number)

    def skip(self, number: int, *, expected: bool) -> None:
        """An update was left out: fp16's scale was too large, and the schedule waits; else it is an error."""
        if not expected:
            raise NonFinite(f"a gradient{self.error_suffix} is not finite at step {number}, so its update was left out")
        self.skipped += 1

    def settle(self) -> None:
        """Losses of the last steps into the window, in one copy: one by one they cost 6 us each."""
        if self._pending_losses:
            count = len(self.steps)
            self.window[count - len(self._pending_losses) : count] = torch.stack(self._pending_losses)
            self._pending_losses.clear()

    def report(self) -> float:
        """The global loss of its last step, and a look at all since the last report."""
        assert self._norm is not None
        self.settle()
        loss = self._reduce_loss(self.window[len(self.steps) - 1])
        lr = self._rate * self.config.train.optimizer.lr
        self.last = {"step": self.steps[-1], "loss": loss, "norm": float(self._norm), "lr": lr}
        self.steps.clear()
        return loss

    def finish(self) -> None:
        """After the loop: what is not yet reported of its last steps."""
        if self.steps:
            self.settle()
            self._reduce_loss(self.window[: len(self.steps)].sum())

    def _reduce_loss(self, loss: Tensor) -> float:
        """The sum over ranks; an error if any of them saw a loss that is not finite since the last report.

        In the same sum the ranks learn that one of them was asked to stop, if it alone got the signal.
        """
        bad = (~self.window[: len(self.steps)].isfinite()).any().to(torch.float64)
        stop = torch.full_like(bad, float(stopping.stop_requested()))
        total, flag, stops = self.world.sum(torch.stack([loss.to(torch.float64), bad, stop])).tolist()
        if stops:
            stopping.request_stop()
        if flag:
            raise self._non_finite_error()
        return total

    def _non_finite_error(self) -> UniparError:
        """The first bad step and the rank that had it: all ranks learn it together."""
        bad = (~self.window[: len(self.steps)].isfinite()).nonzero()
        first = torch.zeros(self.world.size, dtype=torch.float64, device=self.world.device)
        if len(bad):
            first[self.world.rank] = self.steps[int(bad[0])]
        steps = {rank: int(s) for rank, s in enumerate(self.world.sum(first).tolist()) if s}
        rank = min(steps, key=lambda r: steps[r])
        return NonFinite(
            f"the loss{self.error_suffix} is not finite at step {steps[rank]}, first on rank {rank}: look at that batch, the "
            "rate (train.optimizer.lr) and the clip (train.clip)"
        )

    def record(self, steps: int) -> None:
        self._loss_and_norm = torch.zeros((2, steps), dtype=torch.float64, device=self.window.device)

    def recorded_steps(self) -> dict[str, list[Any]]:
        """This rank's share of the loss, and the norm, of each step; and which steps of the run they were."""
        assert self._loss_and_norm is not None
        losses, norms = self._loss_and_norm[:, : len(self._step_numbers)].tolist()
        return {"loss": losses, "norm": norms, "step": list(self._step_numbers)}


@final
class ActivePart:
    """The part that is stepped: inside, no gradient reaches the others; afterwards their buffers are as before."""

    def __init__(self, trained: TrainedPart, parts: Mapping[str, TrainedPart]) -> None:
        self.trained = trained
        self._others = [part for part in parts.values() if part is not trained]
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.seeds = (list(parts).index(trained.name),) if self._others else ()
        """What the random numbers of one of several parts follow from besides run, step and microbatch."""

    def __enter__(self) -> None:
        for part in self._others:
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in part.module.buffers()]
            part.set_trainable(False)

    def __exit__(self, *error: object) -> None:
        for part in self._others:
            part.set_trainable(True)
        if self._buffers:
            with torch.no_grad():
                for buffer, before in self._buffers:
                    buffer.copy_(before)
            self._buffers.clear()


def collect_step_values(parts: Mapping[str, TrainedPart], scale: float) -> dict[str, Any]:
    """What a logged step says: of several parts the sum of their last losses, the norm of all, and each."""
    said = {name: part.last | {"lr": part.last["lr"] * scale} for name, part in parts.items() if part.last is not None}
    if len(parts) == 1:
        return {key: value for row in said.values() for key, value in row.items() if key != "step"}
    loss, norm = sum(row["loss"] for row in said.values()), math.hypot(*(row["norm"] for row in said.values()))
    return {"loss": loss, "norm": norm, "parts": said}


def flatten_logged_step(row: Mapping[str, Any]) -> dict[str, float]:
    """The same for those who know names and numbers only: `loss/critic`."""
    made = {key: value for key, value in row.items() if key not in ("parts", "memory")}
    for phase in row.get("memory", []):
        made[f"memory/{phase['name']}"] = phase["peak"]
    for name, part in row.get("parts", {}).items():
        made |= {f"{key}/{name}": value for key, value in part.items() if key != "step"}
    return made


def combine_recorded_parts(parts: Mapping[str, Mapping[str, list[Any]]], steps: int) -> dict[str, list[float]]:
    """Of what each part recorded, the run's: at each step the sum of the last losses, the norm of all gradients."""
    loss, norm = [0.0] * steps, [0.0] * steps
    for part in parts.values():
        at = [*part["step"], steps + 1]
        for i, (mine, its) in enumerate(zip(part["loss"], part["norm"], strict=True)):
            for step in range(at[i] - 1, at[i + 1] - 1):
                loss[step] += mine
                norm[step] = math.hypot(norm[step], its)
    return {"loss": loss, "norm": norm}


def iterate_pieces(parts: Mapping[str, TrainedPart]) -> Iterator[Piece]:
    for name, part in parts.items():
        for piece in part.engine.pieces():
            yield piece if len(parts) == 1 else replace(piece, name=f"{name}.{piece.name}")


def restore_parts(parts: Mapping[str, TrainedPart], read: Read) -> None:
    for name, part in parts.items():
        part.engine.restore(read if len(parts) == 1 else _PartRead(name, read))


@final
class _PartRead:
    """A `Read` for one part of several."""

    def __init__(self, part: str, read: Read) -> None:
        self._part, self._read = part, read

    def __call__(self, name: str, kind: str, where: tuple[int, int]) -> Tensor:
        return self._read(f"{self._part}.{name}", kind, where)

    def kinds(self, name: str) -> set[str]:
        return self._read.kinds(f"{self._part}.{name}")
