"""Processes of one strategy in a comparison: alive from start to end, training only when it is their turn."""

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
from unipar.launcher.micro_batch.choice import ChosenMicro
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.starters import SharedForkServer
from unipar.memory.account import MemoryAccount, read_account
from unipar.profiling.work import RankWork
from unipar.results.run_report import Report
from unipar.results.same_training import TrainingMarks
from unipar.run_folder import folder
from unipar.run_folder.heartbeat import LastPhase
from unipar.task.reference import TaskRef

TURNS_MODULE: Final = "unipar.comparison.comparison_worker"
TURNS_ENTRY: Final = f"{TURNS_MODULE}:train_in_turns"


class MemoryNotRecorded(UniparError):
    """Error of recording memory, which does not end the strategy's training."""


def rank_results_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's losses in a run folder."""
    return run / f"rank-{rank}.turns.json"


def _sum_shares(shares: list[list[float]]) -> list[float]:
    """Return the loss of each step: the sum of the ranks' shares."""
    return [sum(step) for step in zip(*shares, strict=True)]


class StrategyWorld:
    """World of one strategy: started, trained some steps at a time, finished; to be closed after an error too."""

    def __init__(
        self,
        settled: SettledConfig,
        ref: TaskRef,
        run: Path,
        environment: Mapping[str, str] | None = None,
        server: SharedForkServer | None = None,
        micro: ChosenMicro | None = None,
    ) -> None:
        """Prepare the world; `server` starts its workers if it can, `environment` makes them record memory.

        `micro`: how its microbatch was found, for the run log.
        """
        self.settled, self.ref, self.run, self._micro = settled, ref, run, micro
        self.backend = registry.find_backend(settled.strategy.backend)
        self._environment, self._watch, self.server = environment or {}, environment is not None, server
        self.size = settled.ranks
        self.ready = False
        """Whether all ranks have built their engines."""

        self._open_contexts = ExitStack()
        self._workers: WorkerGroup | None = None

    def start(self, threads: str) -> float:
        """Start the ranks, wait until all have built their engines, and return the seconds that this took."""
        began = time.monotonic()
        config = self.settled.config
        launch = {"task": self.ref.to_json(), "settled": self.settled.to_json(), "watch": self._watch}
        if self._micro is not None:
            launch["micro"] = self._micro.to_json()
        texts = config.json_for_ranks(), json.dumps(launch, indent=2)
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
                pickled_task=self.ref.pickled_task,
                starter=self.server.starter_of(self.backend) if self.server else None,
            )
        )
        self._receive_answers()
        self.ready = True
        return time.monotonic() - began

    def with_environment(self, run: Path, more: Mapping[str, str]) -> StrategyWorld:
        """Return another world of the same strategy, with more variables in its environment."""
        return StrategyWorld(self.settled, self.ref, run, {**self._environment, **more}, self.server, self._micro)

    def record_memory(self, passes: Sequence[str]) -> None:
        """Train one step for each pass, in which each rank records its memory."""
        self._tell({"go": len(passes), "watch": list(passes)})
        self._receive_answers()

    def warm_up(self, steps: int) -> None:
        """Train steps that are not timed; in all but the first, each rank measures how long it waits."""
        self._tell({"go": steps, "waits": True})
        self._receive_answers()

    def train_steps(self, steps: int) -> list[float]:
        """Train `steps` steps; return the seconds that each took on the slowest rank."""
        self._tell({"go": steps})
        by_rank = [answer["seconds"] for answer in self._receive_answers()]
        return [max(step) for step in zip(*by_rank, strict=True)]

    def marks(self) -> TrainingMarks:
        """Return what the ranks noted of their training in the steps so far."""
        return TrainingMarks.read(self.run, self.size)

    def accounts(self) -> list[MemoryAccount]:
        """Return each rank's memory account after the recording; raise MemoryNotRecorded if a rank has none."""
        self._tell({"account": True})
        for rank, answer in enumerate(self._receive_answers()):
            if answer["lost"]:
                raise MemoryNotRecorded(f"on rank {rank}, {answer['lost']}")
        return [read_account(self.run, rank) for rank in range(self.size)]

    def finish(self) -> dict[str, Any]:
        """End the world; return fields of its row: losses, those of parts, peak resident memory and work of ranks."""
        self._tell({"end": True})
        while not self._running_workers.poll():
            pass
        self.close()
        ranks: list[dict[str, Any]] = [
            json.loads(rank_results_path(self.run, r).read_text("utf-8")) for r in range(self.size)
        ]
        losses = _sum_shares([rank["loss"] for rank in ranks])
        for step, loss in enumerate(losses, 1):
            if not math.isfinite(loss):
                raise NonFinite(
                    f"the loss of step {step} is {loss}; lower train.optimizer.lr, or look for the cause in the task's "
                    "loss"
                )
        names = ranks[0].get("parts", {})
        parts = {name: _sum_shares([rank["parts"][name]["loss"] for rank in ranks]) for name in names}
        work = [RankWork.model_validate(rank["work"], strict=False) for rank in ranks]
        return {"losses": losses, "parts": parts, "peak_rss": Report.read(self.run).peak_rss, "work": work}

    def accounts_so_far(self) -> list[MemoryAccount]:
        """Return the memory accounts that ranks wrote before the strategy failed."""
        accounts: list[MemoryAccount] = []
        for rank in range(self.size):
            with suppress(ReportError):
                accounts.append(read_account(self.run, rank))
        return accounts

    def failed_phase(self, error: BaseException) -> str:
        """Return the phase of the last heartbeat of the rank that failed, or "" if no rank is known."""
        own = error if isinstance(error, WorkerFailed) else error.__cause__
        rank = own.rank if isinstance(own, WorkerFailed) else None
        return "" if rank is None else str(LastPhase.of(self.run, rank) or "")

    def close(self) -> None:
        """Kill the workers that still run, and remove what was opened for them."""
        self._open_contexts.close()

    @property
    def _running_workers(self) -> WorkerGroup:
        assert self._workers is not None, "the world was not started"
        return self._workers

    def _tell(self, message: dict[str, Any]) -> None:
        self._running_workers.send_to_all(json.dumps(message).encode())

    def _receive_answers(self) -> list[dict[str, Any]]:
        """Return an answer from each rank; raise an error if a rank ends or hangs instead."""
        return [json.loads(message) for message in self._running_workers.receive_from_all()]
