"""`unipar report`: the page of what lies in a run folder, made again; of two, one over the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unipar.errors import ReportError
from unipar.folder import write_whole
from unipar.report import change, page, run_page, worlds_page
from unipar.report.kinds import found
from unipar.report.ran import Ran
from unipar.report.seen import Told, mapping
from unipar.report.worlds import Scaling

NAME = "report.html"

Laid = TypeVar("Laid", Told, Ran)


def report(run: Path, after: Path | None = None, out: Path | None = None) -> Path:
    """The page of `run`, beside its figures or at `out`; of two, that of `after` with `run` laid below."""
    kind, file = found(run)
    if after is not None:
        later, file = found(after)
        if later != kind:
            raise ReportError(
                f"{run} holds a {kind} and {after} a {later}: two of one kind can be laid over one another"
            )
        if kind == "scaling":
            raise ReportError(f"{run} and {after} hold a scaling each, which are not laid over one another: give one")
    if kind == "scaling":
        text = worlds_page.page(Scaling.read(file, mapping(file, "scaling")), file.parent)
    elif kind == "comparison":
        now, before = Told.read(file), None if after is None else Told.read(run)
        text = page.page(now, _below(before, now))
    else:
        ran, earlier = Ran.read(file), None if after is None else Ran.read(found(run)[1])
        text = run_page.page(ran, _below(earlier, ran))
    return written(text, out or file.parent / NAME)


def _below(before: Laid | None, now: Laid) -> Laid | None:
    """What may be laid below it."""
    if before is not None and (said := change.another(before, now)):
        raise ReportError(
            f"{before.folder} and {now.folder} trained different things ({said}), whose differences say nothing: give "
            "one of them, or two of one task, which is the same where its file's name and its class are"
        )
    return before


def beside(made: Callable[[], Path]) -> str:
    """The page of what has just ended, as a sentence for its table: it never fails."""
    try:
        return f"page: {made()}"
    except Exception as e:  # what was measured is written already, and must be shown
        return f"no page: {e}" if isinstance(e, ReportError) else f"no page: {type(e).__name__}: {e}"


def written(text: str, to: Path) -> Path:
    """Or a sentence that says why not."""
    try:
        write_whole(to, text)
    except OSError as e:
        raise ReportError(f"{to} cannot be written: {e.strerror}; --out FILE takes another place") from None
    return to
