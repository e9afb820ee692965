"""CONTRIBUTING: its picture is current, its walks are the calls of a run in their order, and it is short."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import unipar
from tests.support.running import Line, running
from tools.layout import picture

pytestmark = pytest.mark.forked
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
IN_WORKERS = ["unipar/launcher/worker_entries.py:train_task", "unipar/config/settled.py:read_settled"]
"""Steps of the config's walk that happen in another process than those before them."""


def block(title: str) -> str:
    """Return the first block of text below a heading."""
    _, _, section = TEXT.partition(f"\n## {title}\n")
    return section.partition("```\n")[2].partition("\n```")[0]


def walk(title: str) -> list[str]:
    """Return the functions of a walk, each as file:name, from the repository's root."""
    places = [line.split()[0] for line in block(title).splitlines()]
    return [place if place.startswith("backends/") else f"unipar/{place}" for place in places]


@contextmanager
def calls() -> Generator[dict[str, None]]:
    """Collect the functions of unipar that are called, as file:name, in the order of their first calls."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/"):
            found.setdefault(f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_qualname}", None)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def in_order(found: dict[str, None], wanted: list[str]) -> list[str]:
    return [place for place in found if place in wanted]


def train(folder: Path) -> None:
    with running(Line(), folder, backend="native", train={"steps": 3, "clip": 1.0}) as run:
        run.train()


def test_the_picture_is_current() -> None:
    """`make layout ARGS=--picture` prints it."""
    assert block("The house") == picture()


def test_it_is_short() -> None:
    """At most 1,800 words, and walks of twenty lines."""
    assert len(TEXT.split()) <= 1800
    assert len(walk("One step")) <= 20
    assert len(walk("One config")) <= 20


def test_the_walk_of_a_step(tmp_path: Path) -> None:
    """A run of this process calls these functions in this order."""
    with calls() as found:
        train(tmp_path)
    assert in_order(found, walk("One step")) == walk("One step")


def test_the_walk_of_a_config(tmp_path: Path) -> None:
    """A launch calls the first part in this order, and a rank the rest."""
    steps = walk("One config")
    config: Any = {"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}}
    with calls() as launched:
        unipar.launch(config, task=Line, overrides={"out": str(tmp_path / "run")}, quiet=True)
    first, rest = (steps[: steps.index(IN_WORKERS[0])], steps[steps.index(IN_WORKERS[-1]) + 1 :])
    assert in_order(launched, first) == first
    with calls() as trained:
        train(tmp_path)
    assert in_order(trained, rest) == rest


@pytest.mark.parametrize("place", IN_WORKERS)
def test_what_a_worker_calls_is_there(place: str) -> None:
    """The functions between them."""
    assert place in walk("One config")
    file, _, name = place.partition(":")
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_files_that_are_named_are_there() -> None:
    """Paths in backticks lead to files and folders of the repository; unipar_x stands for a backend."""
    named = re.findall(r"`((?:tests|tools|docs|unipar|backends)/[\w./]*)`", TEXT.replace("unipar_x", "unipar_native"))
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []
