"""The examples train on real data, offline, and stay short enough to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import unipar
from tests.support.forks import Forks
from unipar.config.config_source import load_config_file

pytestmark = pytest.mark.forked

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_under_a_hundred_lines(file: Path) -> None:
    """One screen or two; the first line says what it shows and names a command."""
    first, *others = file.read_text("utf-8").splitlines()
    assert re.search(r"`unipar (run|plan) configs/(recipes/)?(\w+)\.yaml\b.*`\.\"{3}$", first)
    assert len(others) < 99


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_config_reads_and_points_editors_to_the_schema(file: Path) -> None:
    """Its task is there, the modeline is the first line, and a comment says what to change first."""
    text = file.read_text("utf-8")
    assert text.startswith("# yaml-language-server: $schema=../docs/config.schema.json\n")
    assert "\n# Change first: " in text.partition("\n\n")[0]
    task = load_config_file(file).config.task
    assert task is not None
    assert Path(str(task.use).partition(":")[0]).is_file()


def test_the_character_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the entropy of a uniform guess over its characters to well below it, in 40 steps of one process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on cores that others use too, more threads wait for one another
    report = unipar.launch(
        ROOT / "configs" / "char_gpt.yaml",
        overrides={
            "backend": "single",
            "device": "cpu",
            "task.args": {"layers": 1, "width": 32, "heads": 2, "context": 32},
            "train.steps": 40,
            "train.optimizer.lr": 1e-2,
            "eval.every": 40,
            "eval.batches": 2,
            "out": str(tmp_path / "run"),
        },
        quiet=True,
    )
    losses = dict(report.losses)
    assert 4.4 < losses[1] < 4.8  # ln 96 = 4.56: there are some hundred characters in Python's sources
    assert losses[40] < 3.2
    assert report.evals[-1][0] == 40
    assert 0.15 < report.evals[-1][1]["accuracy"] < 0.5


@pytest.mark.sweep
def test_the_generator_finds_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From anywhere to a few hundredths beside it, on both sides, in 400 steps of the critic and 200 of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = unipar.launch(
        ROOT / "configs" / "gan.yaml",
        overrides={"backend": "single", "parallel.data": 1, "out": str(tmp_path / "run")},
        quiet=True,
    )
    assert [step for step, _ in report.parts["generator"]][-1] == 400
    assert report.losses[0] == (1, report.parts["critic"][0][1])
    assert report.evals[-1][1]["off"] < 0.15
    assert 0.2 < report.evals[-1][1]["right"] < 0.8


def test_the_digits_are_told_apart_by_the_script_itself(tmp_path: Path, forks: Forks) -> None:
    """`python examples/digits.py` trains on two ranks and prints what came of it."""
    done = forks.python([str(ROOT / "examples" / "digits.py")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "strategy    native/nothing, 2 ranks" in done.stdout
    report = unipar.Report.read(tmp_path / "runs" / "digits")
    assert report.steps == 192  # 8 epochs of 24 batches, the last of 28 images
    assert [step for step, _ in report.evals] == [48, 96, 144, 192]
    assert 2.0 < report.losses[0][1] < 3.0
    assert report.evals[-1][1]["accuracy"] > 0.9
