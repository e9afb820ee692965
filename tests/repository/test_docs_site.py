"""The docs as a site: every page is in its navigation, all links lead somewhere, and nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import unipar
from tests.support.programs import skip_because

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
HERE = {"contributing.md", "changes.md", "testing.md"}
"""Pages that docs/site_pages.py makes, besides reports and scripts of examples."""

GROUPS = ("Tutorials", "How-to", "Reference", "Explanation")

LOADED = (
    r"""<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=["']?(\S+?)["'\s>]|<link\b[^>]*?\bhref=["']?(\S+?)["'\s>]"""
)
"""Addresses that a browser loads by itself with a page."""


NO_MKDOCS = "" if find_spec("mkdocs") else "no mkdocs; `make docs` installs it"


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # not --quiet: that forgives warnings
    command += ["--config-file", str(config), "--site-dir", str(folder)]
    told = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NO_MKDOCS:
        pytest.skip(NO_MKDOCS)
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]) == (0, [])
    return folder


def named_pages(nav: Any) -> Iterator[str]:
    """Yield each page of a navigation."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []:
        yield from named_pages(part)


def test_the_navigation_names_every_page() -> None:
    """Once; a page that is added to docs/ is added to mkdocs.yml too."""
    named = list(named_pages(yaml.safe_load(CONFIG)["nav"]))
    there = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(there | HERE)


def test_four_groups_with_twenty_pages() -> None:
    """Each group is a tab; the API counts as one page."""
    groups = {name: pages for group in yaml.safe_load(CONFIG)["nav"] for name, pages in group.items()}
    assert list(groups) == ["Home", *GROUPS, "More"]
    pages = {page.replace("api/", "api/|").partition("|")[0] for name in GROUPS for page in named_pages(groups[name])}
    assert len(pages) <= 20
    assert "navigation.tabs" in yaml.safe_load(CONFIG)["theme"]["features"]


def test_links_to_the_repository_lead_somewhere() -> None:
    """Those that leave docs/, which the site names without a link: a file or a folder is there."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((\.\./[^)#]*)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_the_tutorial_is_first() -> None:
    """After the home page."""
    assert list(named_pages(yaml.safe_load(CONFIG)["nav"]))[:2] == ["index.md", "tutorial.md"]


def test_no_host_is_named() -> None:
    """The site may be put anywhere, and takes its fonts and scripts from nowhere else."""
    config = yaml.safe_load(CONFIG)
    assert not {"site_url", "repo_url", "edit_uri"} & set(config)
    assert config["theme"]["font"] is False
    assert "://" not in CONFIG


def test_the_version_is_on_each_page(site: Path) -> None:
    """In the header; links for editing are there if pyproject.toml has the repository's address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for name in ("index", "config", "api/functions", "reports/gpu"):
        page = (site / f"{name}.html").read_text("utf-8")
        assert f"unipar {project['version']}" in page
        assert ("md-source__repository" in page) == ("Repository" in project.get("urls", {}))


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No script, style, picture or font of another host, in no page and no style sheet."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = {link for page in pages for pair in re.findall(LOADED, page.read_text("utf-8")) for link in pair if link}
    assert "assets/iframe-worker.js" in loaded
    assert [link for link in loaded if re.match(r"(?:https?:)?//", link)] == []
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text("utf-8"))


def test_links_between_files_are_links_between_pages(site: Path) -> None:
    """Whether they lead out of docs/, into it or past it; what the site does not have is named without a link."""
    assert 'href="reports/gpu.html"' in (site / "backends.html").read_text("utf-8")
    assert 'href="../testing.html#on-a-machine-with-a-gpu"' in (site / "reports/gpu.html").read_text("utf-8")
    assert 'href="reports/versions.html"' in (site / "testing.html").read_text("utf-8")
    assert 'href="contributing.html#add-a-backend"' in (site / "backends.html").read_text("utf-8")


def test_every_public_name_has_its_entry(site: Path) -> None:
    """Each name of `unipar` but the version is explained in the API, and can be linked to from other sites' docs."""
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    homes = {words[0]: words[3].replace("$", words[0]) for words in map(str.split, lines)}
    for name in set(unipar.__all__) - {"__version__"}:
        home = homes.get(f"unipar.{name}") or homes[f"{getattr(unipar, name).__module__}.{name}"]
        page, _, anchor = home.partition("#")
        assert f'id="{anchor}"' in (site / page).read_text("utf-8")


def test_search_works_from_files(site: Path) -> None:
    """The index is a script too, as a browser reads no data from files; it has our pages and the API."""
    index = (site / "search/search_index.js").read_text("utf-8")
    assert index.startswith("var __index = ")
    for place in ("config.html#schedules", "api/config.html#unipar.config.sections.batch.Batch.accumulate"):
        assert f'"location":"{place}"' in index


BROKEN = {
    "[x](no-such-page.md)": "contains a link 'no-such-page.md', but the target is not found",
    "[x](verify.md#no-such-heading)": "the doc 'verify.md' does not contain an anchor '#no-such-heading'",
    "[x][unipar.no_such_name]": "Could not find cross-reference target",
}
"""A link to a page, a heading and a name that are missing, and what the build says."""


@skip_because(NO_MKDOCS)
def test_broken_links_end_the_build(tmp_path: Path) -> None:
    """Whether page, heading or name is missing, the build fails and says which."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("\n\n".join(["# Home", *BROKEN]), "utf-8")
    (docs / "verify.md").write_text("# Verify\n", "utf-8")
    config = yaml.safe_load(CONFIG)
    del config["hooks"], config["extra"]
    config["plugins"] = [plugin for plugin in config["plugins"] if plugin != "offline"]
    config |= {"docs_dir": str(docs), "nav": ["index.md", "verify.md"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config), "utf-8")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1
    assert [sentence for sentence in BROKEN.values() if sentence not in done.stderr] == []
