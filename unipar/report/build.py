"""`unipar report`: the page of what lies in a run folder, made again; of two, one over the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from unipar.errors import ReportError
from unipar.report.data import changes
from unipar.report.data.comparison import ComparisonPageData
from unipar.report.data.run import RunPageData
from unipar.report.pages import comparison, scaling
from unipar.report.pages import run as pages_run
from unipar.report.pages.elements import GENERATOR_TAG, add_links
from unipar.results.files import RESULT_FILES, ResultKind, find_result_file, read_mapping
from unipar.results.scaling import Scaling
from unipar.utils.files import write_file_atomically

PAGE_FILE_NAME = "report.html"

PAGE_LABELS = {"": "the run", "compare": "the comparison", "worlds": "the comparison by size", "scale": "the scaling"}
"""Where a run folder's pages lie."""

PageData = TypeVar("PageData", ComparisonPageData, RunPageData)


def write_pages(run: Path, after: Path | None = None, out: Path | None = None) -> list[str]:
    """What to say of the pages that were made: of a run folder all, of two the later one's, at `out` one."""
    if after is None and out is None:
        return [f"page: {to}" for to in _write_every_page(run)]
    to, said = _write_one_page(run, after, out)
    return [f"page: {to}", *said]


def write_page(run: Path, after: Path | None = None, out: Path | None = None) -> Path:
    """The page of `run`, beside its figures or at `out`; of two, that of `after` with `run` laid below."""
    return _write_one_page(run, after, out)[0]


def _write_one_page(run: Path, after: Path | None, out: Path | None) -> tuple[Path, list[str]]:
    """Where it lies, and in what two are not alike."""
    kind, file = find_result_file(run)
    if out is not None:
        _check_replaceable(out)
    if after is None:
        return write_html(_render_page(kind, file), out or file.parent / PAGE_FILE_NAME), []
    later, file = find_result_file(after)
    if later != kind:
        raise ReportError(f"{run} holds a {kind} and {after} a {later}: two of one kind can be laid over one another")
    if kind == "scaling":
        raise ReportError(f"{run} and {after} hold a scaling each, which are not laid over one another: give one")
    if kind == "comparison":
        text, said = _render_with_earlier(
            comparison.render_comparison, ComparisonPageData.read(run), ComparisonPageData.read(file)
        )
    else:
        text, said = _render_with_earlier(
            pages_run.render_run, RunPageData.read(find_result_file(run)[1]), RunPageData.read(file)
        )
    return write_html(text, out or file.parent / PAGE_FILE_NAME), said


def _write_every_page(run: Path) -> list[Path]:
    """All pages of a run folder; where one cannot be made the others are, and then an error says why."""
    first = find_result_file(run)
    files: dict[Path, ResultKind] = {run / name: kind for name, kind in RESULT_FILES.items() if (run / name).is_file()}
    files = files or {first[1]: first[0]}
    texts: dict[Path, str] = {}
    wrong: list[str] = []
    for file, kind in files.items():
        try:
            texts[file.parent / PAGE_FILE_NAME] = _render_page(kind, file)
        except ReportError as e:
            wrong.append(str(e))
    made = [write_html(text, to, texts) for to, text in texts.items()]
    if wrong:
        rest = f" (the other pages are there: {', '.join(map(str, made))})" if made else ""
        raise ReportError("; ".join(wrong) + rest)
    return made


def _render_page(kind: ResultKind, file: Path) -> str:
    if kind == "comparison":
        return comparison.render_comparison(ComparisonPageData.read(file))
    if kind == "run":
        return pages_run.render_run(RunPageData.read(file))
    return scaling.render_scaling(Scaling.read(file, read_mapping(file, "scaling")), file.parent)


def _check_replaceable(out: Path) -> None:
    """Raise where something else than a page of ours would be replaced."""
    if not out.exists() or out.is_dir():  # which says so when it is written
        return
    if not out.is_file() or GENERATOR_TAG not in out.read_bytes()[:1000].decode("utf-8", "replace"):
        raise ReportError(f"{out} is there and is no page of unipar's, so it is not replaced: give --out another name")


def _render_with_earlier(
    made: Callable[[PageData, PageData], str], before: PageData, now: PageData
) -> tuple[str, list[str]]:
    """The later one's page with the earlier one below; an error where they are of different things."""
    if said := changes.describe_different_tasks(before, now):
        raise ReportError(
            f"{before.folder} and {now.folder} trained different things ({said}), whose differences say nothing: give "
            "one of them, or two of one task, which is the same where its file's name and its class are"
        )
    return made(now, before), changes.describe_mismatches(before, now)


def try_write_page(made: Callable[[], Path]) -> str:
    """The page of what has just ended, as a sentence for its table: it never fails."""
    try:
        return f"page: {made()}"
    except Exception as e:  # what was measured is written already, and must be shown
        return f"no page: {e}" if isinstance(e, ReportError) else f"no page: {type(e).__name__}: {e}"


def write_html(text: str, to: Path, others: Collection[Path] = ()) -> Path:
    """With links to the pages that lie beside it, or will; or a sentence that says why not."""
    try:
        write_file_atomically(to, add_links(text, _links_to_other_pages(to, others)))
    except OSError as e:
        raise ReportError(f"{to} cannot be written: {e.strerror}; --out FILE takes another place") from None
    return to


def _links_to_other_pages(to: Path, others: Collection[Path]) -> dict[str, str]:
    """From a page in a run folder to the folder's other pages: what each is, and where."""
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
    kept = {label: at for label, at in there.items() if at != to and (at in others or at.is_file())}
    return {label: "../" * up + at.relative_to(root).as_posix() for label, at in kept.items()}
