"""Pages of the site that are not in docs/: CONTRIBUTING, changes and examples. mkdocs calls the `on_` functions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
"""Pages of the site, and the file that each is."""

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def example_page(script: Path) -> str:
    """Return the page of an example: what its docstring says, and the script."""
    text = script.read_text("utf-8")
    return f"# {script.name}\n\n{ast.get_docstring(ast.parse(text))}\n\n```python\n{text}```\n"


def relinked(markdown: str, page: str) -> str:
    """Return a page with its links to the files beside docs/, and theirs into docs/, as links between pages.

    What the site does not have, such as a folder of tests, is named without a link.
    """
    up = "../" * page.count("/")
    for site, file in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(file)}(#[^)]*)?\)", rf"]({up}{site}\1)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)
    if page in PAGES:
        return markdown.replace("](docs/", "](")
    return re.sub(rf"\[([^\]]+)\]\({'../' * (page.count('/') + 1)}(?!\.\.)[^)]*\)", r"\1", markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Return the site's config with each example in its navigation."""
    assert config.nav is not None
    for section in config.nav:
        if "Examples" in section:
            section["Examples"] = [f"examples/{script.stem}.md" for script in EXAMPLES]
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
