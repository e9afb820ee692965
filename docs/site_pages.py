"""Pages of the site that are not in docs/: contributing, testing, changes, reports and examples; version and links.

mkdocs calls the `on_` functions.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPORTS = sorted((ROOT / "benchmarks/reports").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "testing.md": "tests/README.md",
    **{f"reports/{report.name}": f"benchmarks/reports/{report.name}" for report in REPORTS},
}
"""Pages of the site, and the file that each is."""

PLACES = {file: page for page, file in PAGES.items()} | {
    f"examples/{script.name}": f"examples/{script.stem}.md" for script in EXAMPLES
}
"""Page of each file that is not in docs/."""


def example_page(script: Path) -> str:
    """Return the page of an example: what its docstring says, and the script."""
    text = script.read_text("utf-8")
    return f"# {script.name}\n\n{ast.get_docstring(ast.parse(text))}\n\n```python\n{text}```\n"


def relinked(markdown: str, page: str) -> str:
    """Return a page with its links between files of the repository as links between pages of the site.

    A file that the site does not have, such as a test, is named without a link.
    """
    folder = dirname(PAGES.get(page, f"docs/{page}"))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        file = normpath(f"{folder}/{target}")
        place = file.removeprefix("docs/") if file.startswith("docs/") else PLACES.get(file)
        return text if place is None else f"[{text}]({relpath(place, dirname(page) or '.')}{anchor})"

    return re.sub(r"\[((?:[^\[\]]|!?\[[^\]]*\](?:\([^)]*\))?)+)\]\(([^)#\s]+)(#[^)]*)?\)", link, markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Return the config with the version, each report and example, and the address of the repository if it has one."""
    assert config.nav is not None
    config.site_name = f"unipar {PROJECT['version']}"
    for group in config.nav:
        for section in group.get("More", ()):
            if "Reports" in section:
                section["Reports"] = [f"reports/{report.name}" for report in REPORTS]
            if "Scripts of examples" in section:
                section["Scripts of examples"] = [f"examples/{script.stem}.md" for script in EXAMPLES]
    if (address := PROJECT.get("urls", {}).get("Repository")) is not None:
        config.repo_url = address
        config.repo_name = address.removesuffix("/").rpartition("/")[2]
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the site's files with those from outside of docs/ added."""
    for site, file in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / file).read_text("utf-8")))
    for script in EXAMPLES:
        files.append(File.generated(config, f"examples/{script.stem}.md", content=example_page(script)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with the links that the site has."""
    return relinked(markdown, page.file.src_uri)
