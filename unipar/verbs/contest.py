"""Worlds that take turns: how steps are cut, who is asked what, and what each has come to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from unipar.checks import CheckedSource
from unipar.config import Batch, Config
from unipar.errors import ConfigError, Stopped, TaskError, UniparError
from unipar.memory.account import ORDER, PASSES, Account
from unipar.memory.meter import SETTLED, NoMeter, built, forgetful, preloading
from unipar.plan import Prepared, prepare
from unipar.procfs import cores_per_rank
from unipar.report.board import Board
from unipar.report.comparison import Found, Row, spread
from unipar.source import Given
from unipar.task import Task, TaskRef
from unipar.text import count_of, format_duration
from unipar.verbs.contestant import Contestant, Unwatched
from unipar.verbs.sending import asks_apart, with_library_traffic

UNWATCHED = "memory was not watched"

Now = TypeVar("Now", bound=Found)


@dataclass(frozen=True)
class Turns:
    """How a comparison's steps are cut: to warm up, watched, in timed rounds."""

    warmup: int
    rounds: tuple[int, ...]
    watched: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, *, memory: bool = False) -> Self:
        steps, repeat = config.train.steps, config.compare.repeat
        if steps is None:
            raise ConfigError(
                f"train.epochs: {config.train.epochs} cannot be cut into turns, which are counted in steps; "
                "give train.steps instead (--set train.steps=50)"
            )
        if steps < repeat + 1:
            raise ConfigError(
                f"train.steps: {steps} is too few to compare: 1 to warm up and {repeat} timed rounds "
                f"(compare.repeat) of at least 1 make {repeat + 1}"
            )
        warmup = min(2, steps - repeat)
        spare = steps - warmup - repeat if memory else 0
        watched = tuple(sorted(PASSES[:spare], key=ORDER.index))
        each, more = divmod(steps - warmup - len(watched), repeat)
        return cls(warmup, tuple(each + (i < more) for i in range(repeat)), watched)


@dataclass(frozen=True)
class Asked:
    """What is to be trained in turns; all that can be known without a process was looked at."""

    prepared: Prepared
    ref: TaskRef
    turns: Turns
    meter: Mapping[str, str] | None
    """What makes workers count what they allocate; None where memory is not watched."""

    unwatched: str
    """Why it is not."""

    @property
    def source(self) -> CheckedSource:
        return self.prepared.source

    @classmethod
    def of(
        cls,
        config: Given,
        overrides: Mapping[str, Any] | None,
        task: type[Task] | None,
        starts: str,
    ) -> Self:
        """`starts`: what a launcher that started this process would make of it."""
        prepared = prepare(config, task, overrides, starts=starts)
        assert prepared.ref is not None
        turns, meter, unwatched = _cut(prepared)
        return cls(prepared, prepared.ref, turns, meter, unwatched)


def _cut(prepared: Prepared) -> tuple[Turns, dict[str, str] | None, str]:
    """Its turns; what makes workers count what they allocate, or None and why."""
    config = prepared.source.config
    meter, unwatched = _meter(config, prepared.device)
    turns = Turns.of(config, memory=meter is not None)
    if meter is None or len(turns.watched) == len(PASSES):
        return turns, meter, unwatched
    leaves = f"train.steps: {config.train.steps} leaves no"
    if not turns.watched:
        return turns, None, f"{UNWATCHED}: {leaves} step for it beside those that are timed"
    blind = "" if "sent" in turns.watched else ", so that what a step sends was not seen"
    enough = turns.warmup + len(turns.rounds) + len(PASSES)
    few = f"memory was watched in {count_of(len(turns.watched), 'step')}{blind}: {leaves} more; {enough} would"
    return turns, meter, "; ".join(filter(None, [few, unwatched]))


def _meter(config: Config, device: str) -> tuple[dict[str, str] | None, str]:
    """What makes workers count what they allocate, which is nothing for CUDA's memory; or None; and why."""
    if not config.compare.memory:
        return None, ""
    on_cuda = device != "cpu"
    if on_cuda and (why := forgetful(os.environ)):
        return None, f"{UNWATCHED}: {why}"
    try:
        return preloading(built()), ""
    except NoMeter as e:
        if on_cuda:
            return {}, f"{UNWATCHED}: of the host, {e}"
        return dict(SETTLED), f"of memory torch's own tensors alone were watched: {e}"


def threads(widest: int) -> str:
    """Of a rank, so that those of the largest world share the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(cores_per_rank(widest)))


class Contest(Generic[Now]):
    """What is found so far, a row for each world by its name, and the worlds that are still in it."""

    def __init__(
        self, now: Now, board: Board, runs: Mapping[str, Contestant], threads: str, keep: Callable[[Now], object]
    ) -> None:
        """Each rank has so many `threads`, a world of one too: the same arithmetic. `keep` is given what has ended."""
        self.now, self._board, self._in, self._threads, self._keep = now, board, dict(runs), threads, keep
        self._notes = {row.cell: row.note for row in now.rows}

    def play(self, turns: Turns) -> Now:
        with ExitStack() as stack:
            for run in self._in.values():
                stack.callback(run.close)
            try:
                self._start()
                self._take_turns(turns)
                self._finish()
            except (KeyboardInterrupt, Stopped):
                self.now = replace(self.now, interrupted=True)
        return self.now

    def _start(self) -> None:
        """One after another: side by side they take as long."""
        for name in list(self._in):
            self._say(name, "starts", note="starts")
            with self._failing(name) as run:
                seconds = run.start(self._threads)
                self._say(name, f"is ready after {format_duration(seconds)}", note="is ready", started=seconds)

    def _take_turns(self, turns: Turns) -> None:
        for name in list(self._in):
            with self._failing(name) as run:
                run.go(turns.warmup)
                self._say(name, "is warm", note="is warm", marks=run.marks())
                self._hold(name)
        if turns.watched:
            self._watch(turns.watched)
        for i, steps in enumerate(turns.rounds):
            for name in rotated(list(self._in), i):
                with self._failing(name) as run:
                    took = run.go(steps)
                    row = self._row(name)
                    where = f"round {i + 1} of {len(turns.rounds)}"
                    self._say(name, f"{where}: {spread(took)} ms a step", seconds=[*row.seconds, took])

    def _watch(self, passes: Sequence[str]) -> None:
        for name in list(self._in):
            with self._failing(name) as run:
                run.watch(passes)
                self._say(name, "was watched", note="was watched", memory=self._accounts(name, run))
        self._keep(self.now)

    def _finish(self) -> None:
        """One by one: what is whole is kept, whatever becomes of the rest."""
        for name in list(self._in):
            with self._failing(name) as run:
                if (seen := self._row(name).memory) and asks_apart(run):
                    whole = with_library_traffic(run, seen, self._threads)
                    for account in whole:
                        account.write(run.run)
                    self._say(name, "was asked for what it sends", memory=whole)
                losses, parts, peak_rss = run.finish()
                note = self._notes[name]
                came = {"losses": losses, "parts": parts, "peak_rss": peak_rss}
                self._say(name, "has ended", outcome="ran", note=note, marks=run.marks(), **came)
                self._hold(name)
            self._keep(self.now)

    def _accounts(self, name: str, run: Contestant) -> list[Account]:
        """None, and a note, where what watches broke: the cell itself goes on."""
        try:
            return require_same_method(run.accounts(), self.now.rows)
        except Unwatched as e:
            self._notes[name] = "; ".join(filter(None, [self._notes[name], f"{UNWATCHED}: {e}"]))
            return []

    def _hold(self, name: str) -> None:
        """Only what trains the same is compared."""
        if why := self.now.unlike(self._row(name)):
            self._in.pop(name).close()
            self._say(name, f"is not alike: {why}", outcome="unlike", note=why)

    @contextmanager
    def _failing(self, name: str) -> Generator[Contestant]:
        """A cell at work: what it raises ends it, and it alone. What is wrong in the first is wrong in all."""
        run = self._in[name]
        try:
            yield run
        except Stopped:
            raise
        except (UniparError, OSError) as e:
            if name == self.now.rows[0].cell and isinstance(e, TaskError | ConfigError):
                raise
            del self._in[name]
            run.close()
            left = {"at": run.failed_phase(e), "memory": self._row(name).memory or run.accounts_so_far()}
            self._say(name, f"has failed: {str(e).splitlines()[0]}", outcome="failed", note=str(e), **left)

    def _row(self, name: str) -> Row:
        return next(row for row in self.now.rows if row.cell == name)

    def _say(self, name: str, line: str, **changed: Any) -> None:
        rows = [replace(row, **changed) if row.cell == name else row for row in self.now.rows]
        self.now = replace(self.now, rows=rows)
        self._board.show(self.now, f"{name} {line}")


def require_same_method(found: list[Account], rows: Iterable[Row]) -> list[Account]:
    """The same; Unwatched, where it was watched in another way than what it would stand beside."""
    own = f"on rank {found[0].rank}", found[0].method
    where, method = next(((f"in {row.cell}", theirs.method) for row in rows for theirs in row.memory), own)
    for account in found:
        if account.method != method:
            ways = f"in another way ({account.method}) than {where} ({method})"
            raise Unwatched(f"on rank {account.rank} it was seen {ways}")
    return found


@contextmanager
def terminable() -> Generator[None]:
    """SIGTERM ends the body as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rotated(things: Sequence[Any], by: int) -> list[Any]:
    """Each round begins with another cell, so that none always follows the same one."""
    at = by % len(things) if things else 0
    return [*things[at:], *things[:at]]


def sizes_of(worlds: Sequence[int] | str) -> list[int]:
    """The smallest first; `1,2,4` is a list, too."""
    if isinstance(worlds, str):
        words = [word.strip() for word in worlds.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"--world: {worlds!r} is no list of sizes; put commas between them (--world 1,2,4)")
        worlds = [int(word) for word in words]
    made = sorted(set(worlds))
    if len(made) < 2 or made[0] < 1:
        raise ConfigError(
            f"--world: {','.join(map(str, worlds)) or 'none'} does not scale: "
            "give two sizes or more, each of at least 1 (--world 1,2)"
        )
    return made


def batch_with_fixed_total(batch: Batch, smallest: int) -> Batch:
    """What keeps the total batch of the smallest world in every other one."""
    least = batch.settle(smallest)
    return batch if batch.total is not None else Batch(total=least.total, accumulate=least.accumulate)
