"""The README's example trains, and the commands that it shows are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forks import Forks

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def block(language: str, name: str) -> str:
    found = re.findall(rf"```{language}\n(# {re.escape(name)}\n.*?)```", README, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_it_opens_with_the_two_commands() -> None:
    """What it is; what the system must give; make demo and make test."""
    title, _, _, _, _, system, _, _, demo, test, *_ = README.splitlines()
    assert title == "# unipar"
    assert system.startswith("From a checkout, on Debian: `apt install make git g++ python3-venv python3-dev`, then")
    assert demo.startswith("$ make demo")
    assert test.startswith("$ make test")


def test_it_is_short() -> None:
    """650 words, code and tables included."""
    assert len(README.split()) <= 650


def test_the_example_trains(tmp_path: Path, forks: Forks) -> None:
    """Its two files, as they stand there, in two processes."""
    for language, name in (("python", "train.py"), ("yaml", "train.yaml")):
        (tmp_path / name).write_text(block(language, name), encoding="utf-8")
    words = ["-m", "unipar", "run", "train.yaml", "--set", "train.steps=3", "--set", "train.schedule.warmup=1"]
    done = forks.python(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "strategy    native/parameters, 2 ranks\n" in done.stdout


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\$ unipar (\w+)", README, re.MULTILINE))))
def test_every_command_is_there(command: str, forks: Forks) -> None:
    """A name that the README shows is one that the program knows."""
    done = forks.unipar([command, "--help"])
    assert done.returncode == 0, done.stderr
