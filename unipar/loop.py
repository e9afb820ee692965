"""The loop. There is one: what a task sees of its run, the same under every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from unipar import stopping
from unipar.backend import Engine, Micro
from unipar.beat import Heart
from unipar.call import moved
from unipar.config import Config, Sizes
from unipar.data import Feed, Plan, source_of
from unipar.errors import NonFinite, TaskError, UniparError
from unipar.evaluation import Evaluation
from unipar.ledger import Ledger
from unipar.optim import factor
from unipar.seeds import mix, sow_torch
from unipar.stopping import Boundary
from unipar.task import Task
from unipar.track import Trackers
from unipar.world import World

_AT_ONCE = 64
"""Losses that are kept one by one before they are copied into the window."""


@final
@dataclass(frozen=True, slots=True)
class Share:
    """This rank's microbatches of one optimizer step; `share[0]` is what collate made."""

    micros: Sequence[Micro]
    samples: int
    """In the global batch."""

    def __getitem__(self, i: int) -> Any:
        return self.micros[i].batch

    def __len__(self) -> int:
        return len(self.micros)


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave: its number from 1, and the global batch's loss on the steps that log."""

    step: int
    loss: float | None


@final
@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: the next step's."""

    step: int
    epoch: int
    batch: int


@final
class Run:
    """One rank's side of a run."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        engine: Engine,
        world: World,
        config: Config,
        sizes: Sizes,
        *,
        ledger: Ledger,
        heart: Heart,
        trackers: Trackers,
    ) -> None:
        self.task, self.engine, self.world, self.config, self.sizes = task, engine, world, config, sizes
        self.rank, self.size, self.device = world.rank, world.size, world.device
        self.done = 0
        """Optimizer steps that are behind."""

        self._module, self._ledger, self._heart, self._trackers = module, ledger, heart, trackers
        self._mark = heart.mark
        self._loss, self._seed, self._every = task.loss, config.train.seed, config.log.every
        self._collate = task.collate if task.gives("collate") else None
        self._weighs = task.gives("weight")
        self._boundary = Boundary(world)
        self._feed: Feed | None = None
        self._steps = config.train.steps
        self._spare: Any = None
        self._next_seed = 0
        self._window = torch.zeros(self._every, dtype=torch.float64, device=world.device)
        self._fresh: list[Tensor] = []
        self._filled = 0
        self._since = time.perf_counter()
        self._record: Tensor | None = None
        self._evaluation: Evaluation | None = None
        self._gate: Callable[[int], None] | None = None

    # What the run is over

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self._steps is None:
            assert self.config.train.epochs is not None
            self._steps = self.config.train.epochs * self.feed.order.per_epoch
        return self._steps

    @property
    def feed(self) -> Feed:
        """The run's own data, read from the task when first asked for."""
        if self._feed is None:
            self._feed = self._fed(self.task.data())
        return self._feed

    @property
    def position(self) -> Position:
        return Position(self.done, *divmod(self.done, self.feed.order.per_epoch))

    def seek(self, step: int) -> None:
        """Stand before the step after `step` ones: part of taking state in."""
        self.done = step

    def _fed(self, given: Any) -> Feed:
        source = source_of(given, self._collate, self.task.collate, self.config, self.sizes)
        self._agree(len(source))
        pin = self.device.type == "cuda"
        return Feed(source, self.sizes, self.rank, self._seed, pin=pin)

    def _agree(self, samples: int) -> None:
        """Data of another length on another rank would be other batches, or a hang."""
        if self.size == 1 or self.world.store is None:
            return
        key = self.world.key("samples")
        if self.rank == 0:
            self.world.store.set(key, str(samples))
        elif (first := int(self.world.store.get(key))) != samples:
            raise TaskError(
                f"the data has {samples} samples on rank {self.rank} and {first} on rank 0: every rank must see all "
                "of it, and unipar divides it"
            )

    # The loop's verbs

    def batches(self) -> Iterator[Share]:
        """The run's own data, one share an optimizer step; evaluates between steps when that is due."""
        return self._shares(self.feed)

    def over(self, loader: Any) -> Iterator[Share]:
        """The same over a loader of the script's own, whose dataset, collate_fn and workers are taken."""
        self._feed = self._fed(loader)
        return self._shares(self._feed)

    def step(self, share: Share) -> Outcome:
        """Forward, backward, accumulate, clip, update."""
        if not isinstance(share, Share):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's code
            raise TaskError(f"run.step takes a Share, as run.batches() and run.over() yield; it was given {share!r}")
        number = self.done + 1
        self._heart.step = number
        self._next_seed = self.rank
        rate = factor(self.config.train.schedule, self.done, self.steps)
        out = self.engine.step(self._fn, share.micros, rate, self._mark)
        self._fresh.append(out.loss)
        self._filled += 1
        if len(self._fresh) == _AT_ONCE:
            self._settle()
        if self._record is not None:
            self._record[0, self.done] = out.loss
            self._record[1, self.done] = out.norm
        self.done = number
        logs = self._filled == self._every or number == self.steps or number == 1
        loss = self._log_step(number, out.norm, rate, share.samples) if logs or out.skipped else None
        if out.skipped:
            raise NonFinite(f"a gradient is not finite at step {number}, so its update was left out")
        self._mark("between")
        return Outcome(number, loss)

    def evaluate(self) -> dict[str, float]:
        """The task's metrics over its validation data, the same on every rank."""
        if self._evaluation is None:
            told = (self.task, self._module, self.engine, self.world, self.config, self.sizes)
            self._evaluation = Evaluation(*told, mark=self._mark)
        self._mark("evaluate")
        means = self._evaluation()
        self._tell("eval", means)
        self._mark("between")
        return means

    def log(self, **named: float | Tensor) -> None:
        """Write named values of this rank into its ledger; rank 0's go to the trackers too."""
        self._tell("log", {k: float(v) for k, v in named.items()})

    def record(self, steps: int) -> None:
        """Keep every step's share of the loss, and its norm, on the device."""
        self._record = torch.zeros((2, steps), dtype=torch.float64, device=self.device)

    def recorded(self) -> dict[str, list[float]]:
        """This rank's shares (the ranks' sum is the loss) and the norms, of the steps done."""
        assert self._record is not None
        losses, norms = self._record[:, : self.done].tolist()
        return {"loss": losses, "norm": norms}

    def wait(self) -> None:
        """Say that silence is meant: somebody else has the turn."""
        self._mark("waiting")

    def gate(self, wait: Callable[[int], None]) -> None:
        """Have `wait` called at every step boundary, with the number of steps done; the last one too."""
        self._gate = wait

    def finish(self) -> None:
        """After the loop: what is not yet reported of its last steps."""
        if self._filled:
            self._settle()
            self._check(self._reduced(self._window[: self._filled].sum()))
        self._trackers.close()
        self._mark("end")

    # How

    def _pass(self, done: int) -> None:
        """A step boundary: where the turn of others is waited for, and a signal is heeded."""
        if self._gate is not None:
            self._gate(done)
        if done < self.steps:
            self._boundary(done)

    def _shares(self, feed: Feed) -> Iterator[Share]:
        every = self.config.eval.every
        ready = feed.batches(self.done)
        while self.done < self.steps:
            before = self.done
            self._pass(before)
            self._heart.step = before + 1
            self._mark("data")
            yield self._share(next(ready), feed)
            if self.done != before + 1:
                raise TaskError(
                    f"the loop called run.step {self.done - before} times for one share; once, with that share, "
                    "is wanted"
                )
            if every and self.done % every == 0:
                self.evaluate()
        self._pass(self.done)

    def _share(self, read: list[tuple[Any, Plan]], feed: Feed) -> Share:
        samples = feed.samples(self.done)
        if not self._weighs:
            return Share([Micro(moved(batch, self.device), plan.weight) for batch, plan in read], samples)
        weights = [self._weight(batch, len(plan.keys)) if plan.weight else 0.0 for batch, plan in read]
        total = torch.tensor(sum(weights), dtype=torch.float64, device=self.device)
        whole = self.world.sum(total).item()
        if not whole > 0:
            raise TaskError(f"weight(batch) is {whole:g} over the whole global batch of step {self.done + 1}")
        self._spare = next((b for (b, _), w in zip(read, weights, strict=True) if w > 0), self._spare)
        if self._spare is None and 0.0 in weights:
            self._spare = feed.spare(self._weight)
        micros = [(b if w > 0 else self._spare, w / whole) for (b, _), w in zip(read, weights, strict=True)]
        return Share([Micro(moved(batch, self.device), scale) for batch, scale in micros], samples)

    def _weight(self, batch: Any, samples: int = 1) -> float:
        weight = self.task.weight(batch)
        if weight is not None and not float(weight) >= 0:
            raise TaskError(f"weight(batch) is {float(weight):g}; a number that is not negative is wanted")
        return float(samples if weight is None else weight)

    def _fn(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, under PyTorch's random numbers of this step's microbatch, whichever rank computes it."""
        sow_torch(mix(self._seed, 3, self.done, self._next_seed))
        self._next_seed += self.size
        loss: Any = self._loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TaskError(f"loss() returned {shown}; the mean over the batch, a scalar tensor, is wanted")
        return loss

    def _settle(self) -> None:
        """Losses of the last steps into the window, in one copy: one by one they cost 6 us each."""
        if self._fresh:
            self._window[self._filled - len(self._fresh) : self._filled] = torch.stack(self._fresh)
            self._fresh.clear()

    def _reduced(self, loss: Tensor) -> tuple[float, bool]:
        """The sum over ranks, and whether any rank saw a loss that is not finite since the last log.

        In the same sum the ranks learn that one of them was asked to stop, if it alone got the signal.
        """
        bad = (~self._window[: self._filled].isfinite()).any().to(torch.float64)
        stop = torch.full_like(bad, float(stopping.asked()))
        total, flag, stops = self.world.sum(torch.stack([loss.to(torch.float64), bad, stop])).tolist()
        if stops:
            stopping.ask()
        return total, flag > 0

    def _check(self, reduced: tuple[float, bool]) -> float:
        if reduced[1]:
            raise self._blame()
        self._filled = 0
        return reduced[0]

    def _blame(self) -> UniparError:
        """The first bad step and the rank that had it: all ranks learn it together."""
        bad = (~self._window[: self._filled].isfinite()).nonzero()
        first = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        if len(bad):
            first[self.rank] = self.done - self._filled + 1 + int(bad[0])
        steps = {rank: int(s) for rank, s in enumerate(self.world.sum(first).tolist()) if s}
        rank = min(steps, key=lambda r: steps[r])
        return NonFinite(
            f"the loss is not finite at step {steps[rank]}, first on rank {rank}: look at that batch, the rate "
            "(train.optimizer.lr) and the clip (train.clip)"
        )

    def _log_step(self, number: int, norm: Tensor, rate: float, samples: int) -> float:
        self._settle()
        count = self._filled
        loss = self._check(self._reduced(self._window[count - 1]))
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / count, now
        lr = rate * self.config.train.optimizer.lr * self.config.train.lr_scale.factor(self.sizes.total)
        row = {"loss": loss, "norm": float(norm), "lr": lr, "samples": samples, "seconds": seconds}
        self._ledger.note("step", step=number, of=self.steps, **row)
        self._trackers.write(number, row)
        return loss

    def _tell(self, event: str, named: Mapping[str, float]) -> None:
        self._ledger.note(event, step=self.done, **named)
        self._trackers.write(self.done, {f"{event}/{k}": v for k, v in named.items()})
