"""docs/launchers.md: what it shows is what `unipar submit --print` prints; docs/config.md has every option."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from unipar.config.job_system import find_job_system
from unipar.config.validation_errors import list_known_keys

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "launchers.md").read_text("utf-8")
NET = """
import unipar


class Net(unipar.Task):
    def model(self): ...

    def data(self): ...

    def loss(self, model, batch): ...
"""
SYSTEMS = ("slurm", "kubernetes", "ray", "mpi")


def section(name: str) -> str:
    """The part of the page below a heading."""
    (found,) = re.findall(rf"^### {name}\n(.*?)(?=^###? )", PAGE, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unipar: Any) -> None:
    """For the page's config, with the section's `machines`; paths of the working directory and Python replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    (config,) = re.findall(r"```yaml\n# train.yaml\n(.*?)```", PAGE, re.DOTALL)
    (machines,) = re.findall(r"```yaml\n(machines:.*?)```", section(name), re.DOTALL)
    (tmp_path / "train.yaml").write_text(config + machines, encoding="utf-8")
    (tmp_path / "train.py").write_text(NET, encoding="utf-8")
    told = unipar("submit", "train.yaml", "--print")
    assert told.code == 0, told.err
    printed = told.out.replace(str(tmp_path), "/home/me/work").replace(sys.executable, "/home/me/venv/bin/python")
    (shown,) = re.findall(r"```console\n\$ unipar submit train.yaml --print\n(.*?)```", section(name), re.DOTALL)
    assert shown == printed


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_option_is_there(name: str) -> None:
    """A row for each key, in order, with its default."""
    page = (DOCS / "config.md").read_text("utf-8")
    rows = re.findall(rf"^\| `machines\.{name}\.(\w+)` \| [^|]+ \| `", page, re.MULTILINE)
    assert rows == list(list_known_keys(find_job_system(name).options))
