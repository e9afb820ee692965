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
    """One line of what the system must give, then make demo and make test."""
    first, _, _, demo, test, *_ = README.splitlines()
    assert first.startswith("On Debian, once: `apt install make git g++ python3-venv python3-dev`.")
    assert demo.startswith("$ make demo")
    assert test.startswith("$ make test")


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


def test_the_example_of_a_submission(forks: Forks) -> None:
    """It shows a job for Slurm on a machine without Slurm and without a GPU, such as this one may be."""
    (line,) = re.findall(r"^\$ unipar (submit .* --print)\b", README, re.MULTILINE)
    done = forks.unipar(line.split())
    assert done.returncode == 0, done.stderr
    assert "\n#SBATCH --nodes=2\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("$ sbatch ")
