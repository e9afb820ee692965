"""`unipar compare`: the same training in every cell, the cells taking turns, and what came of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from unipar import devices, registry
from unipar.config import Cell, Config, Eval
from unipar.errors import BackendNotInstalled, ConfigError, Stopped, TaskError, UniparError, Unsupported, WorldMismatch
from unipar.folder import owned
from unipar.memory.account import ORDER, PASSES
from unipar.memory.meter import SETTLED, NoMeter, built, forgetful, preloading
from unipar.plan import look_at_weights
from unipar.report.board import Board
from unipar.report.comparison import Comparison, Row, spread
from unipar.report.seen import asked_of
from unipar.report.table import duration
from unipar.report.worlds import Scaling
from unipar.source import Source, given
from unipar.task import Reached, Task, TaskRef, importing
from unipar.verbs import kept
from unipar.verbs.contestant import Contestant
from unipar.verbs.report import beside
from unipar.verbs.sending import completed

ONE = Cell("single")
"""One process without a wrapper: what all others are held to."""

UNWATCHED = "memory was not watched"

Now = TypeVar("Now", Comparison, Scaling)


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


def compare(
    config: str | Path | Mapping[str, Any] | Config | Source,
    *,
    task: type[Task] | None = None,
    cells: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Train what `config` says in every cell, by turns; `cells` are instead of its `compare.cells`.

    Progress goes to stderr; the Comparison prints as a table.
    """
    if importing():
        raise Reached
    source = given(config, overrides)
    settled = _settled(source.config)
    turns, meter, unwatched = cut(settled)
    ref = TaskRef.of(task, settled.task, {})
    ref.look()
    look_at_weights(source)
    entrants = entered(settled, tuple(cells) or settled.compare.cells)
    folder = source.out / "compare"
    of = kept.identity(settled, list(entrants), ref)
    first = Comparison(
        name=source.name,
        out=str(folder),
        precision=settled.train.precision,
        samples=settled.batch.settle(_ranks(settled)).total,
        warmup=turns.warmup,
        rows=[row for row, _ in entrants.values()],
        unwatched=unwatched,
    )
    with owned(folder):
        if (earlier := kept.earlier(folder, of, overwrite=overwrite)) is not None:
            return _with_page(folder, earlier)
        runs = {
            name: Contestant(Cell.parse(name), at, ref, folder / Cell.parse(name).slug, meter)
            for name, (row, at) in entrants.items()
            if row.outcome == "waits"
        }
        kept.write(folder, of, first)
        asked_of(folder, source.name).parent.mkdir(exist_ok=True)
        asked_of(folder, source.name).write_text(source.config.written(), encoding="utf-8")
        with terminable(), Board() as board:
            now = Contest(first, board, runs).play(turns)
        kept.write(folder, of, now)
        return _with_page(folder, now)


def _with_page(folder: Path, now: Comparison) -> Comparison:
    """With a word on its page."""
    return replace(now, note="; ".join(filter(None, [now.note, beside(folder)])))


def cut(config: Config) -> tuple[Turns, dict[str, str] | None, str]:
    """Its turns; what makes workers count what they allocate, or None and why."""
    meter, unwatched = _meter(config)
    turns = Turns.of(config, memory=meter is not None)
    if meter is not None and not turns.watched:
        why = f"train.steps: {config.train.steps} leaves no step for it beside those that are timed"
        return turns, None, f"{UNWATCHED}: {why}"
    return turns, meter, unwatched


def _meter(config: Config) -> tuple[dict[str, str] | None, str]:
    """What makes workers count what they allocate, which is nothing for CUDA's memory; or None; and why."""
    if not config.compare.memory:
        return None, ""
    on_cuda = devices.device(config)[0] != "cpu"
    if on_cuda and (why := forgetful(os.environ)):
        return None, f"{UNWATCHED}: {why}"
    try:
        return preloading(built()), ""
    except NoMeter as e:
        if on_cuda:
            return {}, f"{UNWATCHED}: of the host, {e}"
        return dict(SETTLED), f"of memory torch's own tensors alone were watched: {e}"


def _settled(config: Config) -> Config:
    """With the number of ranks that its cells will have."""
    if (place := devices.found()) is not None:
        raise WorldMismatch(
            f"compare starts a world for each cell, and this is rank {place.rank} of one that {place.launcher} "
            "started: run it without that launcher"
        )
    said = config.parallel.data
    number = said if isinstance(said, int) else devices.ranks(config).number
    devices.check_enough(config, number)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": number})})


def entered(config: Config, patterns: Iterable[str]) -> dict[str, tuple[Row, Config]]:
    """Each cell by name, with its config; those that cannot run have their sentence already. `single` is first."""
    found: dict[str, tuple[Row, Config]] = {}
    alone = registry.at(config, ONE)
    note = ""
    if alone.train.precision == "bf16-master":
        alone = alone.model_copy(update={"train": alone.train.model_copy(update={"precision": "fp32"})})
        note = "in fp32: one process keeps no second copy"
    registry.check(alone)
    found[str(ONE)] = Row(cell=str(ONE), outcome="waits", note=note), _bare(alone)
    for pattern in patterns:
        try:
            cells = registry.expand((pattern,))
        except Unsupported as e:
            found[pattern] = Row(cell=pattern, outcome="refused", note="; ".join(e.reasons)), config
            continue
        for cell in cells:
            if str(cell) not in found:
                found[str(cell)] = checked(config, cell)
    return found


def checked(config: Config, cell: Cell) -> tuple[Row, Config]:
    """What runs in it, or its sentence."""
    name = str(cell)
    try:
        at = registry.at(config, cell)
        registry.check(at)
    except Unsupported as e:
        return Row(cell=name, outcome="refused", note="; ".join(e.reasons)), config
    except ConfigError as e:  # an option contradicts this cell
        return Row(cell=name, outcome="refused", note=str(e)), config
    except BackendNotInstalled as e:
        return Row(cell=name, outcome="absent", note=str(e)), config
    return Row(cell=name, outcome="waits"), _bare(at)


def _bare(config: Config) -> Config:
    """Nothing but steps: what else a run does between them would be timed with them."""
    return config.model_copy(update={"eval": Eval(), "log": config.log.model_copy(update={"to": ()})})


def _ranks(config: Config) -> int:
    assert isinstance(config.parallel.data, int)
    return config.parallel.data


def each(widest: int) -> int:
    """Threads of a rank, so that those of the largest world share the cores."""
    return max(1, len(os.sched_getaffinity(0)) // widest)


class Contest(Generic[Now]):
    """What is found so far, a row for each world by its name, and the worlds that are still in it."""

    def __init__(self, now: Now, board: Board, runs: Mapping[str, Contestant]) -> None:
        self.now, self._board, self._in = now, board, dict(runs)
        self._notes = {row.cell: row.note for row in now.rows}
        self._threads = each(max(run.size for run in runs.values()))  # in `single` too: the same arithmetic

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
                self._say(name, f"is ready after {duration(seconds)}", note="is ready", started=seconds)

    def _take_turns(self, turns: Turns) -> None:
        for name in list(self._in):
            with self._failing(name) as run:
                run.go(turns.warmup)
                self._say(name, "is warm", note="is warm")
        for name in list(self._in) if turns.watched else ():
            with self._failing(name) as run:
                run.watch(turns.watched)
                self._say(name, "was watched", note="was watched", memory=run.accounts())
        for i, steps in enumerate(turns.rounds):
            for name in rotated(list(self._in), i):
                with self._failing(name) as run:
                    took = run.go(steps)
                    row = self._row(name)
                    where = f"round {i + 1} of {len(turns.rounds)}"
                    self._say(name, f"{where}: {spread(took)} ms a step", seconds=[*row.seconds, took])

        for name in list(self._in) if turns.watched else ():
            with self._failing(name) as run:
                whole = completed(run, self._row(name).memory, self._threads)
                self._say(name, "was asked for what it sends", memory=whole)

    def _finish(self) -> None:
        for name in list(self._in):
            with self._failing(name) as run:
                losses, parts, peak_rss = run.finish()
                note = self._notes[name]
                came = {"losses": losses, "parts": parts, "peak_rss": peak_rss}
                self._say(name, "has ended", outcome="ran", note=note, **came)

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
            left = {"at": run.fell(e), "memory": self._row(name).memory or run.left()}
            self._say(name, f"has failed: {str(e).splitlines()[0]}", outcome="failed", note=str(e), **left)

    def _row(self, name: str) -> Row:
        return next(row for row in self.now.rows if row.cell == name)

    def _say(self, name: str, line: str, **changed: Any) -> None:
        rows = [replace(row, **changed) if row.cell == name else row for row in self.now.rows]
        self.now = replace(self.now, rows=rows)
        self._board.show(self.now, f"{name} {line}")


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
