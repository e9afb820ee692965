"""`unipar report`: write the pages of a run folder, or one page that compares two folders."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from unipar.errors import ReportError
from unipar.report.data import result_changes as changes
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.observation_data import ObservationPageData
from unipar.report.data.run_data import RunPageData
from unipar.report.data.verification_data import VerificationPageData
from unipar.report.html.elements import GENERATOR_TAG, add_links
from unipar.report.pages import comparison_page as comparison
from unipar.report.pages import observation_page as observation
from unipar.report.pages import run_page as pages_run
from unipar.report.pages import scaling_page as scaling
from unipar.report.pages import verification_page as verification
from unipar.report.pages.difference_page import render_difference
from unipar.results.result_files import RESULT_FILES, ResultKind, find_result_file, parse_scaling, read_mapping
from unipar.results.training_difference import TrainingDifference
from unipar.results.training_summary import read_training
from unipar.run_folder.layout import PAGE_FILE_NAME, run_log_path
from unipar.utils.files import write_file_atomically

PAGE_LABELS = {
    "": "the run",
    "compare": "the comparison",
    "worlds": "the comparison by size",
    "scale": "the scaling",
    "verify": "the verification",
}
"""Folders of a run folder that hold a page, and the names of these pages in links."""

PageData = TypeVar("PageData", ComparisonPageData, RunPageData)
"""Data of a page that can be compared with an earlier one."""


def write_pages(run: Path, after: Path | None = None, out: Path | None = None, width: int = 80) -> list[str]:
    """Write all pages of a run folder, or one page if `after` or `out` is given; return lines to print about them."""
    if after is not None and "observation" in (find_result_file(run)[0], find_result_file(after)[0]):
        difference = TrainingDifference(read_training(run), read_training(after))
        return [difference.table(width), "", f"page: {_write_difference(difference, out)}"]
    if after is None and out is None:
        return [f"page: {to}" for to in _write_every_page(run)]
    to, mismatches = _write_one_page(run, after, out)
    return [f"page: {to}", *mismatches]


def write_page(run: Path, after: Path | None = None, out: Path | None = None) -> Path:
    """Write the page of `run`, or of `after` compared with `run`, at `out` or beside its results; return its path."""
    return _write_one_page(run, after, out)[0]


def write_run_page(run: Path) -> Path:
    """Write the page of the run in a folder, whatever else is in it; return its path."""
    return write_html(_render_page("run", run / "rank-0.jsonl"), run / PAGE_FILE_NAME)


def _write_difference(difference: TrainingDifference, out: Path | None) -> Path:
    """Write the page on two trainings of which one at least was observed, with the later one's own sections below."""
    after = difference.after
    if out is not None:
        _check_replaceable(out)
    own: list[str] = []
    if after.kind == "observation":
        own = observation.observation_sections(ObservationPageData.read(after.folder / "observed.json"))
    elif after.kind == "run":
        own = pages_run.run_sections(RunPageData.read(run_log_path(after.folder, 0)))
    return write_html(render_difference(difference, own), out or after.folder / PAGE_FILE_NAME)


def _write_one_page(run: Path, after: Path | None, out: Path | None) -> tuple[Path, list[str]]:
    """Write the page; return its path and the differences that make the two folders hard to compare."""
    kind, file = find_result_file(run)
    if out is not None:
        _check_replaceable(out)
    if after is None:
        return write_html(_render_page(kind, file), out or file.parent / PAGE_FILE_NAME), []
    later, file = find_result_file(after)
    if "observation" in (kind, later):
        return _write_difference(TrainingDifference(read_training(run), read_training(after)), out), []
    if later != kind:
        raise ReportError(f"{run} holds a {kind} and {after} a {later}: only two of the same kind can be compared")
    if kind in ("scaling", "verification"):
        raise ReportError(f"{run} and {after} each hold a {kind}, and two {kind}s cannot be compared: give one")
    if kind == "comparison":
        text, mismatches = _render_with_earlier(
            comparison.render_comparison, ComparisonPageData.read(run), ComparisonPageData.read(file)
        )
    else:
        text, mismatches = _render_with_earlier(
            pages_run.render_run, RunPageData.read(find_result_file(run)[1]), RunPageData.read(file)
        )
    return write_html(text, out or file.parent / PAGE_FILE_NAME), mismatches


def _write_every_page(run: Path) -> list[Path]:
    """Write all pages of a run folder; return their paths; if one is impossible, raise ReportError after the others."""
    first = find_result_file(run)
    files: dict[Path, ResultKind] = {}
    for name, kind in RESULT_FILES.items():  # of several files with the same page, the first counts
        file = run / name
        if file.is_file() and file.parent not in {other.parent for other in files}:
            files[file] = kind
    files = files or {first[1]: first[0]}
    texts: dict[Path, str] = {}
    errors: list[str] = []
    for file, kind in files.items():
        try:
            texts[file.parent / PAGE_FILE_NAME] = _render_page(kind, file)
        except ReportError as e:
            errors.append(str(e))
    written = [write_html(text, to, texts) for to, text in texts.items()]
    if errors:
        rest = f" (the other pages were written: {', '.join(map(str, written))})" if written else ""
        raise ReportError("; ".join(errors) + rest)
    return written


def _render_page(kind: ResultKind, file: Path) -> str:
    if kind == "comparison":
        return comparison.render_comparison(ComparisonPageData.read(file))
    if kind == "run":
        return pages_run.render_run(RunPageData.read(file))
    if kind == "observation":
        return observation.render_observation(ObservationPageData.read(file))
    if kind == "verification":
        return verification.render_verification(VerificationPageData.read(file))
    return scaling.render_scaling(parse_scaling(file, read_mapping(file, "scaling")), file.parent)


def _check_replaceable(out: Path) -> None:
    """Raise ReportError if a file that unipar did not write would be replaced."""
    if not out.exists() or out.is_dir():  # writing to a folder raises an error of its own
        return
    if not out.is_file() or GENERATOR_TAG not in out.read_bytes()[:1000].decode("utf-8", "replace"):
        raise ReportError(
            f"{out} exists and is not a page written by unipar, so it is not replaced: give --out another name"
        )


def _render_with_earlier(
    render: Callable[[PageData, PageData], str], before: PageData, now: PageData
) -> tuple[str, list[str]]:
    """Return the later folder's page, compared with the earlier one, and their mismatches; raise if tasks differ."""
    if tasks := changes.describe_different_tasks(before, now):
        raise ReportError(
            f"{before.folder} and {now.folder} trained different things ({tasks}) and cannot be compared: give one of "
            "them, or two of the same task (the same file name and class)"
        )
    return render(now, before), changes.describe_mismatches(before, now)


def try_write_page(write: Callable[[], Path]) -> str:
    """Write a page and return one line for the table: its path, or why there is none; never raise."""
    try:
        return f"page: {write()}"
    except Exception as e:  # the results are written already and must still be shown
        return f"no page: {e}" if isinstance(e, ReportError) else f"no page: {type(e).__name__}: {e}"


def write_html(text: str, to: Path, others: Collection[Path] = ()) -> Path:
    """Write a page with links to the folder's other pages, those that exist or are in `others`."""
    try:
        write_file_atomically(to, add_links(text, _links_to_other_pages(to, others)))
    except OSError as e:
        raise ReportError(f"{to} cannot be written: {e.strerror}; give another path by --out FILE") from None
    return to


def _links_to_other_pages(to: Path, others: Collection[Path]) -> dict[str, str]:
    """Return label and relative path of each other page of the run folder; {} if the page is not in a run folder."""
    to, others = to.absolute(), {at.absolute() for at in others}
    place, above = to.parent.name, to.parents[1]
    if to.name != PAGE_FILE_NAME or not any((to.parent / Path(name).name).is_file() for name in RESULT_FILES):
        return {}
    up = 1 if any((above / name).is_file() for name in RESULT_FILES if name.startswith(f"{place}/")) else 0
    up = 2 if above.name == "worlds" and place.startswith("world-") else up
    root = to.parents[up]
    there = {label: root / folder / PAGE_FILE_NAME for folder, label in PAGE_LABELS.items()}
    if up and to.relative_to(root).parts[0] == "worlds":
        there |= {f"the comparison in {at.name}": at / PAGE_FILE_NAME for at in sorted(root.glob("worlds/world-*"))}
    linked = {label: at for label, at in there.items() if at != to and (at in others or at.is_file())}
    return {label: "../" * up + at.relative_to(root).as_posix() for label, at in linked.items()}
