"""docs/config.md and docs/cli.md: their tables are what `make reference` makes of the schema and the commands."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools import reference
from unipar.cli.app import COMMANDS

CONFIG, COMMAND_LINE = ((reference.DOCS / name).read_text("utf-8") for name in reference.PAGES)


def test_the_pages_are_current(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else: make reference"""
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    assert (reference.main(), capsys.readouterr().out) == (0, "")


def test_a_default_that_is_not_the_code_s_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that says something else than the code is named, and written anew without `--check`."""
    wrong = CONFIG.replace("| `checkpoint.keep` | integer > 0 | `3` |", "| `checkpoint.keep` | integer > 0 | `4` |")
    assert wrong != CONFIG
    (tmp_path / "config.md").write_text(wrong, "utf-8")
    (tmp_path / "cli.md").write_text(COMMAND_LINE, "utf-8")
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    assert reference.main() == 1
    assert capsys.readouterr().out == "docs/config.md is not what `make reference` writes\n"
    monkeypatch.setattr(sys, "argv", ["reference"])
    assert reference.main() == 0
    assert (tmp_path / "config.md").read_text("utf-8") == CONFIG


def test_the_page_has_every_command() -> None:
    """Each once, in one order."""
    headings = re.findall(r"^### unipar (\S+)$", COMMAND_LINE, re.MULTILINE)
    assert headings == list(COMMANDS)


def test_options_of_each_backend_have_defaults() -> None:
    """Every option of a backend has a row with its type and its default, as the schema has them."""
    schema = json.loads((reference.DOCS / "config.schema.json").read_text("utf-8"))
    for name, node in schema["properties"]["options"]["properties"].items():
        for option in schema["$defs"][node["$ref"].rpartition("/")[2]]["properties"]:
            assert re.search(rf"^\| `options\.{name}\.{option}` \| [^|]+ \| `[^|]+` \| \S", CONFIG, re.MULTILINE), (
                option
            )
