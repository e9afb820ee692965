"""All pages of a run folder are written together, with links to one another; other files are never replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.comparisons import write_example_comparison
from tests.support.run_folders import plain
from tests.support.scalings import two_strategies
from unipar.errors import ReportError
from unipar.report.build import write_page, write_pages
from unipar.run_folder.layout import PAGE_FILE_NAME


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run folder with a run, a comparison, a scaling and comparisons by size."""
    run = write_example_comparison(plain(tmp_path / "run"))
    for folder, name in (("scale", "scale.json"), ("worlds", "worlds.json")):
        (run / folder).mkdir()
        (run / folder / name).write_text(json.dumps(two_strategies().model_dump(mode="json")), encoding="utf-8")
    (run / "compare").rename(run / "worlds/world-2")
    write_example_comparison(tmp_path / "again")
    (tmp_path / "again/compare").rename(run / "compare")
    return run


def links(page: Path) -> list[tuple[str, str]]:
    (found,) = re.findall("<nav>.*</nav>", page.read_text("utf-8"))
    return re.findall('<a href="(.*?)">(.*?)</a>', found)


def test_every_page_of_a_run_folder_is_made_and_linked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path is printed; links are relative, and lead to pages that exist."""
    folders = ("compare/", "worlds/", "scale/", "")
    assert write_pages(run) == [f"page: {run}/{folder}report.html" for folder in folders]
    assert links(run / PAGE_FILE_NAME) == [
        ("compare/report.html", "the comparison"),
        ("worlds/report.html", "the comparison by size"),
        ("scale/report.html", "the scaling"),
    ]
    assert links(run / "compare" / PAGE_FILE_NAME)[0] == ("../report.html", "the run")
    for folder in folders:
        for at, _ in links(run / folder / PAGE_FILE_NAME):
            assert (run / folder / at).is_file()
    monkeypatch.chdir(run)
    assert write_pages(Path()) == [f"page: {folder}report.html" for folder in folders]
    assert len(links(run / PAGE_FILE_NAME)) == 3


def test_comparisons_by_size_and_each_of_them_are_linked(run: Path) -> None:
    """Links lead from the page of all sizes to that of one, and back; a folder given by name gets its own page only."""
    write_pages(run)
    assert write_pages(run / "worlds/world-2") == [f"page: {run}/worlds/world-2/report.html"]
    assert ("../../worlds/report.html", "the comparison by size") in links(run / "worlds/world-2" / PAGE_FILE_NAME)
    write_pages(run / "worlds")
    assert ("../worlds/world-2/report.html", "the comparison in world-2") in links(run / "worlds" / PAGE_FILE_NAME)
    for folder in ("worlds", "worlds/world-2"):
        for at, _ in links(run / folder / PAGE_FILE_NAME):
            assert (run / folder / at).is_file()


def test_a_page_without_others_has_no_links(tmp_path: Path) -> None:
    """A page at another path has no links either."""
    run = write_example_comparison(tmp_path / "run")
    assert write_pages(run) == [f"page: {run}/compare/report.html"]
    assert "<nav>" not in (run / "compare" / PAGE_FILE_NAME).read_text("utf-8")
    write_pages(plain(run))
    assert "<nav>" not in write_page(run, out=tmp_path / "x.html").read_text("utf-8")


def test_a_page_that_cannot_be_made_leaves_the_others(run: Path) -> None:
    """The other pages are written, without a link to it; the error names all of them."""
    (run / "scale/scale.json").write_text("{", encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_pages(run)
    assert str(e.value).startswith(f"{run}/scale/scale.json cannot be read: it is truncated or not JSON (")
    others = ", ".join(f"{run}/{folder}report.html" for folder in ("compare/", "worlds/", ""))
    assert str(e.value).endswith(f" (the other pages were written: {others})")
    assert [label for _, label in links(run / PAGE_FILE_NAME)] == ["the comparison", "the comparison by size"]


def test_what_unipar_did_not_write_is_not_replaced(run: Path, tmp_path: Path) -> None:
    """A given path is refused if it is not a page of unipar, and replaced if it is."""
    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html><title>unipar in my thesis</title>", encoding="utf-8")
    for given in (mine, run / "compare/compare.json", Path("/dev/null")):
        before = given.read_bytes()
        with pytest.raises(ReportError) as e:
            write_page(run, out=given)
        assert str(e.value) == (
            f"{given} exists and is not a page written by unipar, so it is not replaced: give --out another name"
        )
        assert given.read_bytes() == before
    ours = write_page(run, out=tmp_path / "x.html")
    assert write_page(run / "scale", out=ours) == ours
    assert "unipar scale" in ours.read_text("utf-8")
    with pytest.raises(ReportError, match=r"cannot be written: Is a directory; give another path by --out FILE"):
        write_page(run, out=tmp_path)
