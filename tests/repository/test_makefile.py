"""The two commands of the README: what they check first, and that they are all there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import PYTEST_WORDS, Forks

ROOT = Path(__file__).parents[2]
TOOLS = ("git", "g++", "sh")


def needs(path: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "HOME": os.environ["HOME"]}
    return subprocess.run([ROOT / ".ci/needs", python], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A path on which there is just what is needed."""
    for name in TOOLS:
        where = shutil.which(name)
        assert where
        (tmp_path / name).symlink_to(where)
    return tmp_path


def test_all_there(system: Path) -> None:
    """Then nothing is said."""
    done = needs(system)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ("git", "unipar: git is missing; on Debian: apt install git\n"),
        ("g++", "unipar: g++, which compiles Horovod, is missing; on Debian: apt install g++\n"),
    ],
)
def test_a_missing_tool_is_one_sentence(system: Path, tool: str, sentence: str) -> None:
    """With its Debian package."""
    (system / tool).unlink()
    done = needs(system)
    assert (done.returncode, done.stderr) == (1, sentence)


def test_a_python_without_headers_and_venv(system: Path) -> None:
    """Debian ships both apart from python3; each is a sentence."""
    python = system / "python3"
    python.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 0;; esac\nexit 1\n', encoding="utf-8")
    python.chmod(0o755)
    done = needs(system, str(python))
    assert done.returncode == 1
    assert done.stderr == (
        "unipar: venv, which makes Python's environments, is missing; on Debian: apt install python3-venv\n"
        "unipar: Python.h, which extensions are compiled with, is missing; on Debian: apt install python3-dev\n"
    )


def test_no_python(system: Path) -> None:
    """An old one counts as none."""
    done = needs(system, "python2.7")
    assert (done.returncode, done.stderr) == (
        1,
        "unipar: Python 3.11, 3.12 or 3.13 is missing; on Debian: apt install python3\n",
    )


@pytest.mark.parametrize(
    "target",
    [
        "demo",
        "test",
        "lint",
        "bench",
        "mesh",
        "reference",
        "words",
        "examples",
        "chaos",
        "sweeps",
        "emulated",
        "conformance",
        "versions",
        "fresh",
        "torchtune",
        "docs",
        "ray",
        "gpu",
        "gpu-wheels",
        "clean",
        "help",
    ],
)
def test_every_command_is_there(target: str) -> None:
    """And help tells of each."""
    made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"  make {target} " in told


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), {"launcher/processes/test_kills.py"}),
        (
            ("-m", "chaos"),
            {
                "chaos/test_checkpoint_kills.py",
                "chaos/test_checkpoint_mutations.py",
                "chaos/test_faults.py",
                "chaos/test_kills.py",
                "chaos/test_training_kills.py",
            },
        ),
        (("-m", "gpu"), {"backends/test_gpu.py"}),
    ],
)
def test_what_a_bare_pytest_plays(words: tuple[str, ...], found: set[str], forks: Forks) -> None:
    """No test that kills at random, none that needs a GPU; a later -m asks for them."""
    files = ["tests/launcher/processes/test_kills.py", "tests/backends/test_gpu.py", "tests/chaos"]
    done = forks.python([*PYTEST_WORDS, "--collect-only", *words, *files], ROOT)
    assert done.returncode == 0, done.stdout
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        f"tests/{file}" for file in found
    }


def test_set_up_stops_at_what_is_missing(tmp_path: Path) -> None:
    """In a fresh checkout nothing is made before the check, and make fails."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    command = ["make", "setup", "PYTHON=python2.7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unipar: Python 3.11, 3.12 or 3.13 is missing; on Debian: apt install python3\n" in done.stderr
    assert not (tmp_path / ".venv").exists()
