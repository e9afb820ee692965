"""CONTRIBUTING's recipes: each diff is applied to a copy of what it changes, and does what the page promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from unipar.results.run_report import Report

ROOT = Path(__file__).parents[2]
LINE = {
    "task": {"use": "tools.line:Line"},
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 4},
    "train": {"steps": 3, "optimizer": {"name": "sgd", "lr": 0.1}},
    "log": {"every": 1},
}
"""Config of a task that is small."""


def recipe(title: str) -> str:
    """Return the diff below a heading of CONTRIBUTING."""
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition(f"\n## {title}\n")
    (diff,) = re.findall(r"```diff\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    return diff


def apply_recipe(title: str, tree: Path, *folders: str) -> None:
    """Copy these folders, and each file that the recipe changes, into a new tree, and apply the diff there."""
    diff = recipe(title)
    for folder in folders:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in re.findall(r"^--- a/(.*)$", diff, re.MULTILINE):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = ["git", "apply", "--whitespace=error", "-"]
    told = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    tree.mkdir(exist_ok=True)
    done = subprocess.run(command, input=diff, cwd=tree, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def written_page(tree: Path, name: str) -> str:
    """Return a page of the docs after `make reference` in a tree."""
    shutil.copytree(ROOT / "tools", tree / "tools", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (tree / "docs").mkdir(exist_ok=True)
    for page in ("config.md", "cli.md"):
        shutil.copy(ROOT / "docs" / page, tree / "docs" / page)
    assert f"written: docs/{name}" in run_python(tree, "-m", "tools.reference")
    return (tree / "docs" / name).read_text("utf-8")


def run_python(tree: Path, *words: str, more: Path | None = None) -> str:
    """Return what a new Python prints that imports unipar, its backends and `tools` from a tree."""
    path = os.pathsep.join(map(str, (tree, tree / "backends", *([more] if more else []))))
    told = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=told, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_config(folder: Path, **sections: Any) -> str:
    """Write the config of the small task, with further sections; return its path."""
    file = folder / "line.yaml"
    file.write_text(json.dumps(LINE | sections), encoding="utf-8")
    return str(file)


def test_an_optimizer(tmp_path: Path) -> None:
    """It trains for three steps on two ranks, and its traits are those of its class."""
    tree = tmp_path / "tree"
    apply_recipe("Add an optimizer", tree, "unipar", "backends", "tools", "tests")
    (name,) = re.findall(r'^\+ +name: Literal\["(\w+)"\]', recipe("Add an optimizer"), re.MULTILINE)
    config = write_config(tmp_path, train={"steps": 3, "optimizer": {"name": name, "lr": 0.1}})
    run_python(tree, "-m", "unipar", "run", config, "--out", str(tmp_path / "run"))
    assert [step for step, _ in Report.read(tmp_path / "run").losses] == [1, 2, 3]
    shutil.copy(ROOT / "pyproject.toml", tree)
    played = ("tests/optimizers/test_traits.py", "-k", name)
    assert run_python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *played).startswith("..  ")


def test_a_backend(tmp_path: Path) -> None:
    """A package that pip installs: `check` accepts it, and two ranks have the losses of DDP."""
    apply_recipe("Add a backend", tmp_path / "tree")
    site = tmp_path / "site"
    words = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(site), "./mine")
    run_python(tmp_path / "tree", "-m", "pip", "install", *words)
    config = write_config(tmp_path)
    said = run_python(ROOT, "-m", "unipar", "check", config, "--backend", "mine", more=site)
    assert "  strategy  mine/nothing, 2 ranks on cpu\n" in said
    losses: list[Any] = []
    for backend in ("mine", "native"):
        out = tmp_path / backend
        run_python(ROOT, "-m", "unipar", "run", config, "--backend", backend, "--out", str(out), more=site)
        losses.append(Report.read(out).losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_command(tmp_path: Path) -> None:
    """Its help has an example, it answers, and the reference has it."""
    apply_recipe("Add a command", tmp_path / "tree", "unipar", "backends")
    assert "\n### unipar divide\n" in written_page(tmp_path / "tree", "cli.md")
    assert "unipar divide configs/char_gpt.yaml" in run_python(tmp_path / "tree", "-m", "unipar", "divide", "--help")
    said = run_python(tmp_path / "tree", "-m", "unipar", "divide", write_config(tmp_path))
    assert said == "4 samples: 2 ranks x 1 microbatches of 2\n"


def test_a_config_key(tmp_path: Path) -> None:
    """`explain` shows it, the schema has it, and it is obeyed from each source."""
    tree = tmp_path / "tree"
    apply_recipe("Add a config key", tree, "unipar", "backends", "tests")
    said = run_python(tree, "-m", "unipar", "explain", write_config(tmp_path), "--set", "eval.first=true")
    assert re.search(r"^eval\.first +true +--set$", said, re.MULTILINE)
    schema = json.loads(run_python(tree, "-m", "unipar", "schema"))
    assert schema["$defs"]["Eval"]["properties"]["first"]["default"] is False
    assert "\n| `eval.first` | `true`, `false` | `false` | Whether" in written_page(tree, "config.md")
    shutil.copy(ROOT / "pyproject.toml", tree)
    played = ("tests/repository/test_every_setting.py", "-k", "eval.first or every_key")
    assert run_python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *played).startswith("....")
