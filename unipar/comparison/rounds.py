"""Cells take turns; what each came to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from unipar.comparison.cell_world import CellWorld, MemoryNotRecorded
from unipar.comparison.library_traffic import has_library_traffic, with_library_traffic
from unipar.comparison.request import NO_MEMORY_NOTE, TurnSchedule
from unipar.errors import ConfigError, Stopped, TaskError, UniparError
from unipar.memory.account import MemoryAccount
from unipar.results.comparison import TurnResults
from unipar.results.live_table import LiveTable
from unipar.results.row import CellResult, format_spread
from unipar.utils.text import format_duration

ResultsT = TypeVar("ResultsT", bound=TurnResults)


class TurnRunner(Generic[ResultsT]):
    """What is found so far, a row for each world by its name, and the worlds that are still in it."""

    def __init__(
        self,
        now: ResultsT,
        board: LiveTable,
        runs: Mapping[str, CellWorld],
        threads: str,
        keep: Callable[[ResultsT], object],
    ) -> None:
        """Each rank has so many `threads`, a world of one too: the same arithmetic. `keep` is given what has ended."""
        self.results, self._board, self._active_worlds, self._threads, self._keep = (
            now,
            board,
            dict(runs),
            threads,
            keep,
        )
        self._notes = {row.cell: row.note for row in now.rows}

    def run_turns(self, turns: TurnSchedule) -> ResultsT:
        with ExitStack() as stack:
            for run in self._active_worlds.values():
                stack.callback(run.close)
            try:
                self._start()
                self._take_turns(turns)
                self._finish()
            except (KeyboardInterrupt, Stopped):
                self.results = replace(self.results, interrupted=True)
        return self.results

    def _start(self) -> None:
        """One after another: side by side they take as long."""
        for name in list(self._active_worlds):
            self._say(name, "starts", note="starts")
            with self._drop_on_error(name) as run:
                seconds = run.start(self._threads)
                self._say(name, f"is ready after {format_duration(seconds)}", note="is ready", started=seconds)

    def _take_turns(self, turns: TurnSchedule) -> None:
        for name in list(self._active_worlds):
            with self._drop_on_error(name) as run:
                run.train_steps(turns.warmup)
                self._say(name, "is warm", note="is warm", marks=run.marks())
                self._drop_if_different(name)
        if turns.memory_passes:
            self._watch(turns.memory_passes)
        for i, steps in enumerate(turns.rounds):
            for name in rotate_order(list(self._active_worlds), i):
                with self._drop_on_error(name) as run:
                    took = run.train_steps(steps)
                    row = self._row(name)
                    where = f"round {i + 1} of {len(turns.rounds)}"
                    self._say(name, f"{where}: {format_spread(took)} ms a step", seconds=[*row.seconds, took])

    def _watch(self, passes: Sequence[str]) -> None:
        for name in list(self._active_worlds):
            with self._drop_on_error(name) as run:
                run.record_memory(passes)
                self._say(name, "was watched", note="was watched", memory=self._accounts(name, run))
        self._keep(self.results)

    def _finish(self) -> None:
        """One by one: what is whole is kept, whatever becomes of the rest."""
        for name in list(self._active_worlds):
            with self._drop_on_error(name) as run:
                if (seen := self._row(name).memory) and has_library_traffic(run):
                    whole = with_library_traffic(run, seen, self._threads)
                    for account in whole:
                        account.write(run.run)
                    self._say(name, "was asked for what it sends", memory=whole)
                losses, parts, peak_rss = run.finish()
                note = self._notes[name]
                came = {"losses": losses, "parts": parts, "peak_rss": peak_rss}
                self._say(name, "has ended", outcome="ran", note=note, marks=run.marks(), **came)
                self._drop_if_different(name)
            self._keep(self.results)

    def _accounts(self, name: str, run: CellWorld) -> list[MemoryAccount]:
        """None, and a note, where what watches broke: the cell itself goes on."""
        try:
            return require_same_method(run.accounts(), self.results.rows)
        except MemoryNotRecorded as e:
            self._notes[name] = "; ".join(filter(None, [self._notes[name], f"{NO_MEMORY_NOTE}: {e}"]))
            return []

    def _drop_if_different(self, name: str) -> None:
        """Only what trains the same is compared."""
        if why := self.results.training_difference(self._row(name)):
            self._active_worlds.pop(name).close()
            self._say(name, f"is not alike: {why}", outcome="unlike", note=why)

    @contextmanager
    def _drop_on_error(self, name: str) -> Generator[CellWorld]:
        """A cell at work: what it raises ends it, and it alone. What is wrong in the first is wrong in all."""
        run = self._active_worlds[name]
        try:
            yield run
        except Stopped:
            raise
        except (UniparError, OSError) as e:
            if name == self.results.rows[0].cell and isinstance(e, TaskError | ConfigError):
                raise
            del self._active_worlds[name]
            run.close()
            left = {"at": run.failed_phase(e), "memory": self._row(name).memory or run.accounts_so_far()}
            self._say(name, f"has failed: {str(e).splitlines()[0]}", outcome="failed", note=str(e), **left)

    def _row(self, name: str) -> CellResult:
        return next(row for row in self.results.rows if row.cell == name)

    def _say(self, name: str, line: str, **changed: Any) -> None:
        rows = [replace(row, **changed) if row.cell == name else row for row in self.results.rows]
        self.results = replace(self.results, rows=rows)
        self._board.show(self.results, f"{name} {line}")


def require_same_method(found: list[MemoryAccount], rows: Iterable[CellResult]) -> list[MemoryAccount]:
    """The same; Unwatched, where it was watched in another way than what it would stand beside."""
    own = f"on rank {found[0].rank}", found[0].method
    where, method = next(((f"in {row.cell}", theirs.method) for row in rows for theirs in row.memory), own)
    for account in found:
        if account.method != method:
            ways = f"in another way ({account.method}) than {where} ({method})"
            raise MemoryNotRecorded(f"on rank {account.rank} it was seen {ways}")
    return found


def rotate_order(things: Sequence[Any], by: int) -> list[Any]:
    """Each round begins with another cell, so that none always follows the same one."""
    at = by % len(things) if things else 0
    return [*things[at:], *things[:at]]
