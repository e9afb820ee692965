"""All pages of a run folder: made together, each with links to the others; and what is never replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.comparisons import write_example_comparison
from tests.support.run_folders import plain
from tests.support.scalings import two_cells
from unipar.errors import ReportError
from unipar.report.build import PAGE_FILE_NAME, write_page, write_pages


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was compared and scaled, too."""
    run = write_example_comparison(plain(tmp_path / "run"))
    for folder, name in (("scale", "scale.json"), ("worlds", "worlds.json")):
        (run / folder).mkdir()
        (run / folder / name).write_text(json.dumps(two_cells().to_json()), encoding="utf-8")
    (run / "compare").rename(run / "worlds/world-2")
    write_example_comparison(tmp_path / "again")
    (tmp_path / "again/compare").rename(run / "compare")
    return run


def links(page: Path) -> list[tuple[str, str]]:
    (found,) = re.findall("<nav>.*</nav>", page.read_text("utf-8"))
    return re.findall('<a href="(.*?)">(.*?)</a>', found)


def test_every_page_of_a_run_folder_is_made_and_linked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path is said; links are relative, and lead to pages that are there."""
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
    """From the page of all to that of one, and back; a folder's own page alone is made where that is named."""
    write_pages(run)
    assert write_pages(run / "worlds/world-2") == [f"page: {run}/worlds/world-2/report.html"]
    assert ("../../worlds/report.html", "the comparison by size") in links(run / "worlds/world-2" / PAGE_FILE_NAME)
    write_pages(run / "worlds")
    assert ("../worlds/world-2/report.html", "the comparison in world-2") in links(run / "worlds" / PAGE_FILE_NAME)
    for folder in ("worlds", "worlds/world-2"):
        for at, _ in links(run / folder / PAGE_FILE_NAME):
            assert (run / folder / at).is_file()


def test_a_page_without_others_has_no_links(tmp_path: Path) -> None:
    """Nor has one that is made to be sent on."""
    run = write_example_comparison(tmp_path / "run")
    assert write_pages(run) == [f"page: {run}/compare/report.html"]
    assert "<nav>" not in (run / "compare" / PAGE_FILE_NAME).read_text("utf-8")
    write_pages(plain(run))
    assert "<nav>" not in write_page(run, out=tmp_path / "x.html").read_text("utf-8")


def test_a_page_that_cannot_be_made_leaves_the_others(run: Path) -> None:
    """They are there, with no link to it; the error names both."""
    (run / "scale/scale.json").write_text("{", encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_pages(run)
    assert str(e.value).startswith(f"{run}/scale/scale.json cannot be read: it is truncated or not JSON (")
    others = ", ".join(f"{run}/{folder}report.html" for folder in ("compare/", "worlds/", ""))
    assert str(e.value).endswith(f" (the other pages are there: {others})")
    assert [label for _, label in links(run / PAGE_FILE_NAME)] == ["the comparison", "the comparison by size"]


def test_what_unipar_did_not_write_is_not_replaced(run: Path, tmp_path: Path) -> None:
    """By a name that was given; a page of ours is."""
    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html><title>unipar in my thesis</title>", encoding="utf-8")
    for given in (mine, run / "compare/compare.json", Path("/dev/null")):
        before = given.read_bytes()
        with pytest.raises(ReportError) as e:
            write_page(run, out=given)
        assert str(e.value) == (
            f"{given} is there and is no page of unipar's, so it is not replaced: give --out another name"
        )
        assert given.read_bytes() == before
    ours = write_page(run, out=tmp_path / "x.html")
    assert write_page(run / "scale", out=ours) == ours
    assert "unipar scale" in ours.read_text("utf-8")
    with pytest.raises(ReportError, match=r"cannot be written: Is a directory; --out FILE takes another place"):
        write_page(run, out=tmp_path)
