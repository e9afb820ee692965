"""Rounds of a comparison: strategies train in turns, and their results are collected."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from unipar.comparison.library_traffic import has_library_traffic, with_library_traffic
from unipar.comparison.request import NO_MEMORY_NOTE, TurnSchedule
from unipar.comparison.strategy_world import MemoryNotRecorded, StrategyWorld
from unipar.errors import ConfigError, Stopped, TaskError, UniparError, Unsupported
from unipar.launcher.processes.starters import SharedForkServer
from unipar.memory.account import MemoryAccount
from unipar.results.comparison import TurnResults
from unipar.results.live_table import LiveTable
from unipar.results.row import StrategyResult, format_spread
from unipar.utils.text import format_duration

ResultsT = TypeVar("ResultsT", bound=TurnResults)


class TurnRunner(Generic[ResultsT]):
    """Runner of all worlds in turns, with the results so far and the worlds that are still running."""

    def __init__(
        self,
        now: ResultsT,
        board: LiveTable,
        runs: Mapping[str, StrategyWorld],
        threads: str,
        keep: Callable[[ResultsT], object],
        server: SharedForkServer,
    ) -> None:
        """Prepare turns of the worlds `runs`, whose rows are in `now`, and whose workers `server` starts.

        `threads`: of each rank, in worlds of one too, so that sums are the same; `keep` saves the results so far.
        """
        self.results, self._board, self._active_worlds, self._threads, self._keep = (
            now,
            board,
            dict(runs),
            threads,
            keep,
        )
        self._fork_server = server
        self._notes = {row.strategy: row.note for row in now.rows}

    def run_turns(self, turns: TurnSchedule) -> ResultsT:
        """Start all worlds, train them in turns, end them, and return the results; an interrupt is noted in them."""
        with ExitStack() as stack:
            for run in self._active_worlds.values():
                stack.callback(run.close)
            try:
                self._start()
                self._take_turns(turns)
                self._finish()
            except (KeyboardInterrupt, Stopped):
                self.results = self.results.changed(interrupted=True)
        return self.results

    def _start(self) -> None:
        """Start the worlds one after another: at the same time they would take as long."""
        if self._active_worlds:
            self._import_libraries()
        for name in list(self._active_worlds):
            self._say(name, "starts", note="starts")
            with self._drop_on_error(name) as run:
                seconds = run.start(self._threads)
                self._say(name, f"is ready after {format_duration(seconds)}", note="is ready", started=seconds)

    def _import_libraries(self) -> None:
        """Start the process from which workers are forked; note in each row that cannot use it why."""
        began = time.monotonic()
        backends = {run.backend.name: run.backend for run in self._active_worlds.values()}
        self._fork_server.start(list(backends.values()))
        if summary := self._fork_server.summary:
            self._board.show(self.results, f"{summary} ({format_duration(time.monotonic() - began)})")
        for name, run in self._active_worlds.items():
            why = self._fork_server.why_separate(run.backend)
            self._notes[name] = "; ".join(filter(None, [self._notes[name], why]))

    def _take_turns(self, turns: TurnSchedule) -> None:
        for name in list(self._active_worlds):
            with self._drop_on_error(name) as run:
                run.warm_up(turns.warmup)
                self._say(name, "is warmed up", note="is warmed up", marks=run.marks())
                self._drop_if_different(name)
        if turns.memory_passes:
            self._record_memory(turns.memory_passes)
        for i, steps in enumerate(turns.rounds):
            for name in rotate_order(list(self._active_worlds), i):
                with self._drop_on_error(name) as run:
                    took = run.train_steps(steps)
                    row = self._row(name)
                    where = f"round {i + 1} of {len(turns.rounds)}"
                    self._say(name, f"{where}: {format_spread(took)} ms a step", seconds=[*row.seconds, took])

    def _record_memory(self, passes: Sequence[str]) -> None:
        for name in list(self._active_worlds):
            with self._drop_on_error(name) as run:
                run.record_memory(passes)
                self._say(name, "has recorded its memory", note="memory recorded", memory=self._accounts(name, run))
        self._keep(self.results)

    def _finish(self) -> None:
        """End the worlds one by one, and save the results after each, in case a later one fails."""
        for name in list(self._active_worlds):
            with self._drop_on_error(name) as run:
                if (accounts := self._row(name).memory) and has_library_traffic(run):
                    complete = with_library_traffic(run, accounts, self._threads)
                    for account in complete:
                        account.write(run.run)
                    self._say(name, "has recorded its communication", memory=complete)
                figures, note = run.finish(), self._notes[name]
                self._say(name, "has ended", outcome="ran", note=note, marks=run.marks(), **figures)
                self._drop_if_different(name)
            self._keep(self.results)

    def _accounts(self, name: str, run: StrategyWorld) -> list[MemoryAccount]:
        """Return the strategy's memory accounts; if the recording failed, none, and note why: the strategy goes on."""
        try:
            return require_same_method(run.accounts(), self.results.rows)
        except MemoryNotRecorded as e:
            self._notes[name] = "; ".join(filter(None, [self._notes[name], f"{NO_MEMORY_NOTE}: {e}"]))
            return []

    def _drop_if_different(self, name: str) -> None:
        """End a world that trains something else than the others: only the same training is compared."""
        if why := self.results.training_difference(self._row(name)):
            self._active_worlds.pop(name).close()
            self._say(name, f"trained differently: {why}", outcome="unlike", note=why)

    @contextmanager
    def _drop_on_error(self, name: str) -> Generator[StrategyWorld]:
        """Context manager: an error in the body ends this strategy only.

        An error of the task or the config in the first strategy is raised, as all other strategies would fail too. In
        another strategy, before its engine is built, an error of the task is the engine's refusal.
        """
        run = self._active_worlds[name]
        try:
            yield run
        except Stopped:
            raise
        except (UniparError, OSError) as e:
            if name == self.results.rows[0].strategy and isinstance(e, TaskError | ConfigError):
                raise
            del self._active_worlds[name]
            run.close()
            if not run.ready and isinstance(e, TaskError | Unsupported):
                note = "; ".join(e.reasons) if isinstance(e, Unsupported) else str(e)
                self._say(name, f"refuses: {note.splitlines()[0]}", outcome="refused", note=note)
                return
            left = {"at": run.failed_phase(e), "memory": self._row(name).memory or run.accounts_so_far()}
            self._say(name, f"has failed: {str(e).splitlines()[0]}", outcome="failed", note=str(e), **left)

    def _row(self, name: str) -> StrategyResult:
        return next(row for row in self.results.rows if row.strategy == name)

    def _say(self, name: str, line: str, **changed: Any) -> None:
        rows = [row.changed(**changed) if row.strategy == name else row for row in self.results.rows]
        self.results = self.results.changed(rows=rows)
        self._board.show(self.results, f"{name} {line}")


def require_same_method(accounts: list[MemoryAccount], rows: Iterable[StrategyResult]) -> list[MemoryAccount]:
    """Return the accounts; raise MemoryNotRecorded if they were recorded by another method than those of the rows."""
    own = f"on rank {accounts[0].rank}", accounts[0].method
    where, method = next(((f"in {row.strategy}", theirs.method) for row in rows for theirs in row.memory), own)
    for account in accounts:
        if account.method != method:
            ways = f"in another way ({account.method}) than {where} ({method})"
            raise MemoryNotRecorded(f"on rank {account.rank} it was recorded {ways}")
    return accounts


def rotate_order(things: Sequence[Any], by: int) -> list[Any]:
    """Return the strategies with another one first in each round."""
    at = by % len(things) if things else 0
    return [*things[at:], *things[:at]]
