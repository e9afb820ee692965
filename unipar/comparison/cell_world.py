"""One cell's processes in a comparison: alive from start to end, at work only when it is their turn."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from unipar.backend import registry
from unipar.config.settled import SettledConfig
from unipar.errors import NonFinite, ReportError, UniparError, WorkerFailed
from unipar.launcher.processes.group import Crew
from unipar.memory.account import Account, read_account
from unipar.results.run import Report
from unipar.results.same_training import Marks
from unipar.run_folder import folder
from unipar.run_folder.heartbeat import At
from unipar.task.reference import TaskRef

ENTRY: Final = "unipar.comparison.worker:turns"


class Unwatched(UniparError):
    """What watches memory broke; what trains did not."""


def results_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.turns.json"


def _summed(shares: list[list[float]]) -> list[float]:
    """The ranks' shares of each step's loss."""
    return [sum(step) for step in zip(*shares, strict=True)]


class Contestant:
    """Start it, let it go some steps at a time, then finish; close it whatever happened."""

    def __init__(
        self, settled: SettledConfig, ref: TaskRef, run: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.settled, self.ref, self.run = settled, ref, run
        self.backend = registry.find(settled.cell.backend)
        self._environment, self._watch = environment or {}, environment is not None
        self.size = settled.ranks
        self._open = ExitStack()
        self._crew: Crew | None = None

    def start(self, threads: str) -> float:
        """Returns when all ranks have built their engines: seconds that took."""
        began = time.monotonic()
        config = self.settled.config
        told = {"task": self.ref.to_json(), "settled": self.settled.to_json(), "watch": self._watch}
        texts = config.written(), json.dumps(told, indent=2)
        self._open.enter_context(folder.made(self.run, *texts, overwrite=True))
        hosted = self._open.enter_context(self.backend.host(config, self.size))
        self._crew = self._open.enter_context(
            Crew.of(
                self.settled,
                self.backend,
                self.run,
                ENTRY,
                {**self._environment, "OMP_NUM_THREADS": threads, **hosted},
                control=True,
                parcel=self.ref.parcel,
            )
        )
        self._answers()
        return time.monotonic() - began

    def again(self, run: Path, more: Mapping[str, str]) -> Contestant:
        """The same cell in another world, with more in its environment."""
        return Contestant(self.settled, self.ref, run, {**self._environment, **more})

    def watch(self, passes: Sequence[str]) -> None:
        """Train a step for each pass, each rank watching its memory."""
        self._tell({"go": len(passes), "watch": list(passes)})
        self._answers()

    def go(self, steps: int) -> list[float]:
        """Train `steps` steps; what each took the slowest rank, in seconds."""
        self._tell({"go": steps})
        by_rank = [answer["seconds"] for answer in self._answers()]
        return [max(step) for step in zip(*by_rank, strict=True)]

    def marks(self) -> Marks:
        """What it was seen to train, once it has gone some steps."""
        return Marks.read(self.run, self.size)

    def accounts(self) -> list[Account]:
        """Of each rank's memory, once it was watched; that takes a while. Unwatched, where a rank could not."""
        self._tell({"account": True})
        for rank, answer in enumerate(self._answers()):
            if answer["lost"]:
                raise Unwatched(f"on rank {rank}, {answer['lost']}")
        return [read_account(self.run, rank) for rank in range(self.size)]

    def finish(self) -> tuple[list[float], dict[str, list[float]], list[int]]:
        """The losses of all steps, those of each of several parts, and each rank's peak of resident memory."""
        self._tell({"end": True})
        while not self._going.poll():
            pass
        self.close()
        told: list[dict[str, Any]] = [json.loads(results_of(self.run, r).read_text("utf-8")) for r in range(self.size)]
        losses = _summed([t["loss"] for t in told])
        for step, loss in enumerate(losses, 1):
            if not math.isfinite(loss):
                raise NonFinite(f"the loss of step {step} is {loss}")
        parts = {name: _summed([t["parts"][name]["loss"] for t in told]) for name in told[0].get("parts", {})}
        return losses, parts, Report.read(self.run).peak_rss

    def accounts_so_far(self) -> list[Account]:
        """What ranks wrote down of their memory before the cell failed."""
        found: list[Account] = []
        for rank in range(self.size):
            with suppress(ReportError):
                found.append(read_account(self.run, rank))
        return found

    def failed_phase(self, error: BaseException) -> str:
        """Where the rank was that failed, by its own last sign."""
        own = error if isinstance(error, WorkerFailed) else error.__cause__
        rank = own.rank if isinstance(own, WorkerFailed) else None
        return "" if rank is None else str(At.of(self.run, rank) or "")

    def close(self) -> None:
        """Ends what still runs, at once."""
        self._open.close()

    @property
    def _going(self) -> Crew:
        assert self._crew is not None, "it was not started"
        return self._crew

    def _tell(self, message: dict[str, Any]) -> None:
        self._going.tell(json.dumps(message).encode())

    def _answers(self) -> list[dict[str, Any]]:
        """One from each rank; raises when one ends or falls silent instead."""
        return [json.loads(message) for message in self._going.hear()]
