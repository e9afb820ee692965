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
from unipar.launcher.processes.group import WorkerGroup
from unipar.memory.account import MemoryAccount, read_account
from unipar.results.run import Report
from unipar.results.same_training import TrainingMarks
from unipar.run_folder import folder
from unipar.run_folder.heartbeat import LastPhase
from unipar.task.reference import TaskRef

TURNS_ENTRY: Final = "unipar.comparison.worker:train_in_turns"


class MemoryNotRecorded(UniparError):
    """What watches memory broke; what trains did not."""


def rank_results_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.turns.json"


def _sum_shares(shares: list[list[float]]) -> list[float]:
    """The ranks' shares of each step's loss."""
    return [sum(step) for step in zip(*shares, strict=True)]


class CellWorld:
    """Start it, let it go some steps at a time, then finish; close it whatever happened."""

    def __init__(
        self, settled: SettledConfig, ref: TaskRef, run: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.settled, self.ref, self.run = settled, ref, run
        self.backend = registry.find_backend(settled.cell.backend)
        self._environment, self._watch = environment or {}, environment is not None
        self.size = settled.ranks
        self._open_contexts = ExitStack()
        self._workers: WorkerGroup | None = None

    def start(self, threads: str) -> float:
        """Returns when all ranks have built their engines: seconds that took."""
        began = time.monotonic()
        config = self.settled.config
        told = {"task": self.ref.to_json(), "settled": self.settled.to_json(), "watch": self._watch}
        texts = config.json_for_ranks(), json.dumps(told, indent=2)
        self._open_contexts.enter_context(folder.create_run_folder(self.run, *texts, overwrite=True))
        hosted = self._open_contexts.enter_context(self.backend.host(config, self.size))
        self._workers = self._open_contexts.enter_context(
            WorkerGroup.of(
                self.settled,
                self.backend,
                self.run,
                TURNS_ENTRY,
                {**self._environment, "OMP_NUM_THREADS": threads, **hosted},
                control=True,
                parcel=self.ref.parcel,
            )
        )
        self._receive_answers()
        return time.monotonic() - began

    def with_environment(self, run: Path, more: Mapping[str, str]) -> CellWorld:
        """The same cell in another world, with more in its environment."""
        return CellWorld(self.settled, self.ref, run, {**self._environment, **more})

    def record_memory(self, passes: Sequence[str]) -> None:
        """Train a step for each pass, each rank watching its memory."""
        self._tell({"go": len(passes), "watch": list(passes)})
        self._receive_answers()

    def train_steps(self, steps: int) -> list[float]:
        """Train `steps` steps; what each took the slowest rank, in seconds."""
        self._tell({"go": steps})
        by_rank = [answer["seconds"] for answer in self._receive_answers()]
        return [max(step) for step in zip(*by_rank, strict=True)]

    def marks(self) -> TrainingMarks:
        """What it was seen to train, once it has gone some steps."""
        return TrainingMarks.read(self.run, self.size)

    def accounts(self) -> list[MemoryAccount]:
        """Of each rank's memory, once it was watched; that takes a while. Unwatched, where a rank could not."""
        self._tell({"account": True})
        for rank, answer in enumerate(self._receive_answers()):
            if answer["lost"]:
                raise MemoryNotRecorded(f"on rank {rank}, {answer['lost']}")
        return [read_account(self.run, rank) for rank in range(self.size)]

    def finish(self) -> tuple[list[float], dict[str, list[float]], list[int]]:
        """The losses of all steps, those of each of several parts, and each rank's peak of resident memory."""
        self._tell({"end": True})
        while not self._running_workers.poll():
            pass
        self.close()
        told: list[dict[str, Any]] = [
            json.loads(rank_results_path(self.run, r).read_text("utf-8")) for r in range(self.size)
        ]
        losses = _sum_shares([t["loss"] for t in told])
        for step, loss in enumerate(losses, 1):
            if not math.isfinite(loss):
                raise NonFinite(f"the loss of step {step} is {loss}")
        parts = {name: _sum_shares([t["parts"][name]["loss"] for t in told]) for name in told[0].get("parts", {})}
        return losses, parts, Report.read(self.run).peak_rss

    def accounts_so_far(self) -> list[MemoryAccount]:
        """What ranks wrote down of their memory before the cell failed."""
        found: list[MemoryAccount] = []
        for rank in range(self.size):
            with suppress(ReportError):
                found.append(read_account(self.run, rank))
        return found

    def failed_phase(self, error: BaseException) -> str:
        """Where the rank was that failed, by its own last sign."""
        own = error if isinstance(error, WorkerFailed) else error.__cause__
        rank = own.rank if isinstance(own, WorkerFailed) else None
        return "" if rank is None else str(LastPhase.of(self.run, rank) or "")

    def close(self) -> None:
        """Ends what still runs, at once."""
        self._open_contexts.close()

    @property
    def _running_workers(self) -> WorkerGroup:
        assert self._workers is not None, "it was not started"
        return self._workers

    def _tell(self, message: dict[str, Any]) -> None:
        self._running_workers.send_to_all(json.dumps(message).encode())

    def _receive_answers(self) -> list[dict[str, Any]]:
        """One from each rank; raises when one ends or falls silent instead."""
        return [json.loads(message) for message in self._running_workers.receive_from_all()]
