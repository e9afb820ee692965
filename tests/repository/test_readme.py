"""The README's example trains, and the commands that it shows are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.corpus.cases import CASES
from tests.corpus.page import thread_link
from tests.support.forks import Forks
from tests.support.world import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def block(language: str, name: str) -> str:
    found = re.findall(rf"```{language}\n(# {re.escape(name)}\n.*?)```", README, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_it_opens_with_the_two_commands() -> None:
    """What it is; what the system must give; make demo and make test."""
    title, _, _, _, _, system, _, _, demo, test, *_ = README.splitlines()
    assert title == "# unipar"
    assert system.startswith("In a checkout, on Debian, `apt install make git g++ python3-venv python3-dev`")
    assert demo.startswith("$ make demo")
    assert test.startswith("$ make test")


def test_it_is_short() -> None:
    """650 words, those of code and tables included, marks of Markdown left out."""
    assert len(re.sub(r"\]\(\S*\)|-{3,}|[|`#]", " ", README).split()) <= 650


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


def test_its_links_lead_somewhere() -> None:
    """Each file that it names is there."""
    links = {link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link}
    assert len(links) > 12
    assert [link for link in sorted(links) if not (ROOT / link).exists()] == []


def test_each_row_beside_other_libraries_has_a_page() -> None:
    """Ten rows, of six columns, each with a link to what holds it."""
    _, _, *rows = re.findall(r"^\|.*\|$", README.partition("## Beside")[2].partition("\n## ")[0], re.MULTILINE)
    assert len(rows) == 10
    assert [row for row in rows if not re.match(r"\|\[[^]]+\]\([\w./-]+\.md\)\|", row) or row.count("|") != 7] == []


def test_its_step_times_are_those_of_the_report() -> None:
    """Ratios of Accelerate, Fabric, and the three stages of DeepSpeed."""
    report = (ROOT / "benchmarks/reports/performance.md").read_text("utf-8")
    ratios = {
        name: float(ratio)
        for name, ratio in re.findall(r"^(\w+(?: ZeRO-\d)?) +\w+/\w+ +\d+ +\d+ +(\d\.\d+) \[", report, re.MULTILINE)
    }
    stages = [ratio for name, ratio in ratios.items() if name.startswith("DeepSpeed")]
    (row,) = re.findall(r"^\|\[unipar's step time.*", README, re.MULTILINE)
    shown = [ratios["Accelerate"], ratios["Fabric"], min(stages), max(stages)]
    assert re.findall(r"\d\.\d+", row) == [f"{ratio:.2f}" for ratio in shown]


def test_the_silent_errors_are_cases_of_the_corpus() -> None:
    """Five of all, by their threads."""
    threads = {re.findall(r"\((.*)\)", thread_link(case.thread))[0] for case in CASES.values()}
    section = README.partition("## Silent errors")[2].partition("\n## ")[0]
    named = re.findall(r"^- \[\w+\]\((.*?)\):", section, re.MULTILINE)
    assert len(named) == 5
    assert set(named) <= threads
    assert f"Five of [{len(CASES)} public reports]" in section


def test_what_ran_on_a_gpu_is_what_its_report_says() -> None:
    """Checks that passed, of all."""
    text = (ROOT / "benchmarks/reports/gpu.md").read_text("utf-8")
    passed, rows = re.findall(r"\[(\d+) of (\d+) checks\]", README)[0]
    assert f"{rows} rows" in text
    assert f"{passed} passed" in text
