"""Worlds for the suite: one fork server, one world for each strategy and size, in which all its cases are played."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import tasks
from tests.conformance.cases import CASES
from tests.conformance.inside import combine_pieces
from tests.conformance.plain import Result, train_by_hand
from tests.support.forks import Forks
from unipar import errors
from unipar.config import Strategy
from unipar.errors import UniparError
from unipar.launcher.processes.group import WorkerGroup

ROOT = Path(__file__).parents[2]


@dataclass
class CaseResult:
    """What a case gave in a strategy, the ranks put together."""

    losses: list[float]
    norms: list[list[float]]
    params: dict[str, torch.Tensor]
    evals: list[list[dict[str, float]]]
    parts: dict[str, list[float]]
    averages: dict[str, torch.Tensor]
    """Whole averages of `train.ema`."""

    unequal_averages: list[str]
    """Names of averages that are not those of one process, which averages the weights of each step, bit for bit."""


class StrategyRunner:
    """Plays all cases of a strategy at a size once, when the first of them is asked for."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self._folder, self._forks = folder, forks
        self._done: dict[tuple[Strategy, int, str], list[dict[str, Any]] | UniparError] = {}
        self._plain: dict[tuple[str, int, int, int], Result] = {}
        self.listens: dict[tuple[Strategy, int], list[str]] = {}
        self.left_in_shared_memory: dict[tuple[Strategy, int], set[str]] = {}
        self.wanted: dict[tuple[Strategy, int], list[str]] = {}

    def result(self, strategy: Strategy, size: int, name: str) -> CaseResult:
        """The result, or the error that the strategy answered with."""
        if (strategy, size, name) not in self._done:
            case = CASES[name]
            shared = [n for n in self.wanted[strategy, size] if not CASES[n].apart]
            self._play(strategy, size, [name] if case.apart else shared)
        ranks = self._done[strategy, size, name]
        if isinstance(ranks, UniparError):
            raise ranks
        for rank in ranks:
            if "error" in rank:
                kind: Any = getattr(errors, rank["error"], None)
                if kind is errors.Unsupported:
                    raise errors.Unsupported(str(strategy), [rank["message"]])
                raise kind(rank["message"]) if kind else AssertionError(f"{rank['error']}: {rank['message']}")
        whole = combine_pieces([p for rank in ranks for p in rank["pieces"]])
        return CaseResult(
            _summed([rank["loss"] for rank in ranks]),
            [rank["norm"] for rank in ranks],
            {n: t for (n, kind), t in whole.items() if kind == "weight"},
            [rank["evals"] for rank in ranks],
            {n: _summed([rank["parts"][n] for rank in ranks]) for n in ranks[0]["parts"]},
            {n: t for (n, kind), t in whole.items() if kind == "average"},
            ranks[0]["unequal averages"],
        )

    def _play(self, strategy: Strategy, size: int, names: list[str]) -> None:
        run = self._folder / f"{strategy.slug}-{size}"
        run.mkdir(parents=True)
        told = {"strategy": str(strategy), "size": size, "cases": names}
        (run / "cases.json").write_text(json.dumps(told), "utf-8")
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        entry = "tests.conformance.inside:run"
        fault: UniparError | None = None
        before = set(os.listdir("/dev/shm"))
        try:
            with WorkerGroup(
                run, size, entry, environment=environment, starter=self._forks, heartbeat=100.0
            ) as workers:
                workers.wait()
        except UniparError as e:
            fault = e
        self.left_in_shared_memory[strategy, size] = _new_in_shared_memory(before)
        if fault is None:
            said = [json.loads((run / f"listens-{rank}.json").read_text("utf-8")) for rank in range(size)]
            self.listens[strategy, size] = [address for rank in said for address in rank]
        for i, name in enumerate(names):
            files = [run / f"{i}-{rank}.pt" for rank in range(size)]
            if all(f.exists() for f in files):
                self._done[strategy, size, name] = [torch.load(f, weights_only=True) for f in files]
            else:  # this one ended the world; those after it have their own
                assert fault is not None
                self._done[strategy, size, name] = fault
                shutil.rmtree(run)
                if rest := names[i + 1 :]:
                    self._play(strategy, size, rest)
                return
        shutil.rmtree(run)

    def plain(self, name: str, size: int, blocks: int, experts: int) -> Result:
        """One process, computed once for all strategies whose models have so many blocks, and experts in each."""
        key = (name, size if CASES[name].micro else 1, blocks, experts)
        if key not in self._plain:
            before = tasks.BLOCKS[0], tasks.EXPERTS[0]
            tasks.BLOCKS[0], tasks.EXPERTS[0] = blocks, experts
            try:
                self._plain[key] = train_by_hand(CASES[name], size)
            finally:
                tasks.BLOCKS[0], tasks.EXPERTS[0] = before  # other tests of this process train these tasks, too
        return self._plain[key]


def _summed(ranks: list[list[float]]) -> list[float]:
    return [sum(shares) for shares in zip(*ranks, strict=True)]


def _new_in_shared_memory(before: set[str]) -> set[str]:
    """Return new files in shared memory that stay though no process uses them; other programs come and go there."""
    until = time.monotonic() + 2.0
    while (left := set(os.listdir("/dev/shm")) - before - _mapped_by_any()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _mapped_by_any() -> set[str]:
    """Files in shared memory that a living process has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text("utf-8", errors="replace")))
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out comparisons of a class of strategies of which fewer than two are played."""
    played = {
        (str(item.callspec.params["strategy"]), item.callspec.params["case"])
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and {"strategy", "size", "case"} <= item.callspec.params.keys()
        and item.callspec.params["size"] == 2
    }
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        alone = False
        if isinstance(item, pytest.Function) and item.originalname == "test_bits":
            params: dict[str, Any] = item.callspec.params
            alone = sum((strategy, params["name"]) in played for strategy in params["strategies"]) < 2
        (left if alone else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(scope="session")
def hall(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> StrategyRunner:
    made = StrategyRunner(tmp_path_factory.mktemp("conformance"), forks)
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and {"strategy", "size", "case"} <= callspec.params.keys():
            key = (callspec.params["strategy"], callspec.params["size"])
            names = made.wanted.setdefault(key, [])
            if callspec.params["case"] not in names:
                names.append(callspec.params["case"])
    return made
