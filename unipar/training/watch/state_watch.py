"""`StateWatch`: the checks of `train.consistency_check`, made by all ranks together in one step of every `every`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch
import torch.distributed as dist

from unipar.backend import Engine, Factor, Piece, Step
from unipar.config import Config
from unipar.data.order import MicrobatchPlan
from unipar.distributed.world import World
from unipar.errors import Inconsistent
from unipar.optimizers.stochastic_rounding import MOMENTS
from unipar.run_folder.run_log import RunLog
from unipar.task import LocalBatch
from unipar.training.watch.copy_check import CopyCheck
from unipar.training.watch.digests import digest_tensor
from unipar.training.watch.update_observer import UpdateObserver
from unipar.utils.text import first_few, short_dtype

_TOLERANCE: Final = 0.01
"""Share by which a norm may differ from the one that is reported: libraries add it up in bf16, or after rounding."""

_WAY_OUT: Final = "`unipar verify` on this config compares the strategy with one process and names the place"


class WatchedPart(Protocol):
    """One part of a run's model, as the watch sees it."""

    name: str
    engine: Engine
    config: Config
    error_suffix: str
    rates: tuple[float, ...]
    """Base learning rate of each of the optimizer's groups."""

    dtypes: Mapping[str, torch.dtype]
    """Dtype in which each trained weight was made."""


@final
@dataclass
class _WatchedEngine:
    """An engine, the steps that it has taken, and the check of its copies."""

    engine: Engine
    copies: CopyCheck
    steps: int = 0
    updates: bool = False
    """Whether its updates are seen, because an optimizer of torch makes them."""


@final
class StateWatch:
    """Watch over the steps of one run: one of every `train.consistency_check.every`, and the second; none without
    `train.consistency_check`.

    In the first step libraries complete their set-up, and move tensors.
    """

    def __init__(self, world: World, config: Config, run_log: RunLog, *, own_optimizer: bool) -> None:
        self._world, self._config, self._run_log = world, config, run_log
        self.every = None if config.train.consistency_check is None else config.train.consistency_check.every
        """Steps from one check to the next; None: no checks."""

        self._local_steps = config.train.local_steps
        self._own_optimizer = own_optimizer
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        """Dtype of each state of the task's own optimizer, as it was seen first."""

        self._observer: UpdateObserver | None = None
        self._faults: list[str] = []
        self._engines: dict[str, _WatchedEngine] = {}
        """Engine of each part."""

    def around_step(self, part: WatchedPart, number: int) -> AbstractContextManager[Any]:
        """Return the context manager for a part's step `number`; it does nothing if the step is not watched."""
        if self.every is None:
            return nullcontext()
        self._faults.clear()
        watched = self._engines.get(part.name)
        if watched is None or watched.engine is not part.engine:
            watched = self._engines[part.name] = _WatchedEngine(part.engine, CopyCheck(self._world))
        watched.steps += 1
        if watched.steps == 1 or (watched.steps > 2 and number % self.every):
            self._observer = None
            return nullcontext()
        pieces = list(part.engine.pieces())
        self._check_dtypes(part, pieces)
        self._observer = UpdateObserver([p for p in pieces if p.kind == "weight" and p.name in part.dtypes])
        return self._observer

    def check(
        self,
        part: WatchedPart,
        number: int,
        out: Step,
        factor: Factor,
        local_batch: LocalBatch,
        plans: Sequence[MicrobatchPlan],
    ) -> None:
        """Raise Inconsistent on all ranks if one of them finds a fault in the step; all ranks call it together."""
        observer, self._observer = self._observer, None
        if observer is None or out.skipped:
            return
        self._check_rates(part, observer, float(factor))
        self._check_updates(part, observer)
        self._check_sums(part, out, observer, local_batch, plans)
        if not self._local_steps or number % self._local_steps == 0:
            self._check_copies(part)
        self._raise_together(part, number)
        if self._engines[part.name].steps == 2:
            unseen = [] if observer.updated else ["norm after the clip", "rate", "update"]
            self._run_log.note("watch", step=number, part=part.name, every=self.every, unseen=unseen)

    # Checks on this rank

    def _check_dtypes(self, part: WatchedPart, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            created, dtype = part.dtypes.get(piece.name), piece.tensor.dtype
            if created is None or not dtype.is_floating_point or not piece.shape or piece.kind == "buffer":
                continue
            if piece.kind != "weight" and self._own_optimizer:
                created = self._dtypes.setdefault((part.name, piece.kind), dtype)
            elif piece.kind in MOMENTS and part.config.train.optimizer.moments_in_bf16:
                created = torch.bfloat16
            if dtype.itemsize < created.itemsize:
                what = "its values are" if piece.kind == "weight" else f"the optimizer's {piece.kind} of it is"
                self._faults.append(
                    f"{piece.name} was made in {short_dtype(created)}, and {what} kept in {short_dtype(dtype)}: small "
                    "updates are lost"
                )
                return

    def _check_rates(self, part: WatchedPart, observer: UpdateObserver, factor: float) -> None:
        expected = [base * factor for base in part.rates]
        in_order = len(observer.rates) == len(expected)
        for i, rate in enumerate(observer.rates):
            if not any(math.isclose(rate, e, rel_tol=1e-6) for e in ([expected[i]] if in_order else expected)):
                wanted = f"{expected[i]:g}" if in_order else " or ".join(f"{e:g}" for e in expected)
                self._faults.append(
                    f"the optimizer took the step at the learning rate {rate:g} in its group {i}, where "
                    f"the group's own rate and the schedule say {wanted}: something else sets the rate (a scheduler of "
                    "the library's, or of the task's)"
                )
                return

    def _check_updates(self, part: WatchedPart, observer: UpdateObserver) -> None:
        watched = self._engines[part.name]
        if not observer.updated:
            if watched.updates:
                self._faults.append("the optimizer took no step, and did before")
            return
        watched.updates = True
        if left_out := sorted(observer.left_out):
            self._faults.append(
                f"the optimizer did not update {first_few(left_out)}: it has no gradient of it, or does not have it at "
                "all"
            )
        for weight in observer.unchanged[:1]:
            self._faults.append(
                f"the update left {weight.name} as it was, though its gradient's norm is {weight.norm:.3g} and its "
                f"learning rate {weight.rate:.3g}: the step had no effect, or is too small "
                f"for {short_dtype(weight.dtype)}"
            )

    # Checks of all ranks together

    def _check_sums(
        self,
        part: WatchedPart,
        out: Step,
        observer: UpdateObserver,
        local_batch: LocalBatch,
        plans: Sequence[MicrobatchPlan],
    ) -> None:
        """Check the norm of what the optimizer got, and the samples, which have to be added up over the ranks."""
        world = self._world
        counts = world.leads
        samples = sum(len(plan.keys) for plan in plans if plan.weight) if counts else 0
        scales = sum(micro.scale for micro in local_batch.micros) if counts else 0.0
        marks = [0.0] * world.data_size
        if counts:
            keys = [key for plan in plans if plan.weight for key in plan.keys]
            once = keys and not any(plan.repeats for plan in plans)
            marks[world.data_rank] = float(hash(tuple(keys)) & ((1 << 52) - 1)) if once else -1.0
        sums = [float(observer.updated), observer.square, samples, scales, *marks]
        updated, square, samples, scales, *marks = world.sum(
            torch.tensor(sums, dtype=torch.float64, device=world.device)
        ).tolist()
        if updated == world.size:
            self._check_norm(part, float(out.norm), math.sqrt(observer.square if self._local_steps else square))
        if world.rank:  # the sums are the same on all ranks: one of them tells
            return
        if plans and round(samples) != local_batch.samples:
            self._faults.append(
                f"the ranks trained on {round(samples)} samples together, and the global batch has "
                f"{local_batch.samples}"
            )
        if not math.isclose(scales, 1.0, rel_tol=1e-9):
            self._faults.append(
                f"the weights of the microbatches add up to {scales:.9g} over the ranks, and must to 1: the loop gave "
                "run.step a part of its local batch, or more than it"
            )
        for share_number, mark in enumerate(marks):
            if mark > 0 and (first := marks.index(mark)) < share_number:
                self._faults.append(
                    f"the ranks of part {share_number} of the batch trained on the samples of part {first}: both have "
                    "read the same data"
                )
                return

    def _check_norm(self, part: WatchedPart, reported: float, got: float) -> None:
        if self._world.rank or not math.isfinite(reported):
            return
        clip = part.config.train.clipping
        expected = reported if clip is None else min(reported, float(clip.max))
        if not math.isclose(got, expected, rel_tol=_TOLERANCE, abs_tol=1e-12):
            limit = "" if clip is None else f", which train.clip ({clip.max:g}) makes {expected:.4g}"
            self._faults.append(
                f"the optimizer got gradients with a norm of {got:.4g}, and the norm that is reported is "
                f"{reported:.4g}{limit}: they were scaled, clipped or reduced in another way than the norm says"
            )

    def _check_copies(self, part: WatchedPart) -> None:
        copies = self._engines[part.name].copies
        for unequal in copies.find_unequal(part.engine.held_weights(), digest_tensor)[:1]:
            self._faults.append(
                f"{unequal.name} has other values here than on rank {unequal.of}, and both should hold the same: "
                "gradients were not reduced over all ranks, or something changes weights on one rank alone"
            )

    def _raise_together(self, part: WatchedPart, number: int) -> None:
        world = self._world
        flag = torch.tensor(float(bool(self._faults)), device=world.device)
        if not world.sum(flag).item():
            return
        faults: list[str | None] = [None] * world.size
        mine = self._faults[0] if self._faults else None
        if world.size > 1:
            dist.all_gather_object(faults, mine)
        else:
            faults = [mine]
        rank, first = next((rank, fault) for rank, fault in enumerate(faults) if fault is not None)
        raise Inconsistent(
            f"train.consistency_check: at step {number}, rank {rank}{part.error_suffix}: {first}; {_WAY_OUT}",
        )


def watched_dtypes(parameters: Iterator[tuple[str, Any]]) -> Mapping[str, torch.dtype]:
    """Return the dtype in which each trained weight was made, before a library changes it."""
    return {name: p.dtype for name, p in parameters if p.requires_grad}
