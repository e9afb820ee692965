"""Exported scripts of a mesh: written, run without unipar, and compared with one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.char_gpt import CharGPT
from tests.support import split_models
from tests.support.exports import FORGETS, HIDES
from tests.support.forks import Forks
from tests.support.world import ROOT
from unipar import Task, join
from unipar.config import config_source as source
from unipar.conversion.export import export_script
from unipar.errors import UniparError

BIN = Path(sys.executable).parent
MODELS, CHARACTERS = ROOT / "tests/support/split_models.py", ROOT / "examples/char_gpt.py"
TOLD: dict[str, Any] = {
    "task": {"use": f"{MODELS}:Llama"},
    "device": "cpu",
    "parallel": {"data": 1},
    "batch": {"total": 8, "micro": 2},
    "train": {
        "steps": 4,
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-5},
        "clip": 0.5,
        "seed": 3,
    },
    "log": {"every": 1},
}
TASKS: dict[str, dict[str, Any]] = {
    "gpt": {"use": f"{CHARACTERS}:CharGPT", "args": {"layers": 4, "width": 32, "heads": 4, "context": 16}},
    **{name.lower(): {"use": f"{MODELS}:{name}"} for name in ("GPT2", "WholeAttention", "Llama", "Bert")},
    "whole": {"use": f"{MODELS}:KeptWhole", "args": {"kind": "multihead"}},
    **{kind: {"use": f"{MODELS}:Kinds", "args": {"kind": kind}} for kind in ("plain", "dry", "dropped")},
}
WEIGHTS = """
    weights, named = {}, getattr(dict(locals()).get("blocks"), "cut", ())
    for name, p in model.named_parameters():
        p = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
        sketch = torch.stack([p.double().sum(), p.double().square().sum()])
        if name in named:
            dist.all_reduce(sketch, group=mesh["tensor"].get_group())
        weights[name] = sketch.tolist()
    Path(f"weights{dist.get_rank()}.json").write_text(json.dumps(weights))
"""
"""Lines at the end of a script's training: sum and sum of squares of each whole parameter that a rank knows."""


def alone(told: Mapping[str, Any], folder: Path) -> tuple[list[float], dict[str, list[float]]]:
    """Return the losses of one process, and a sketch of its weights after training."""
    losses: list[float] = []
    changed = {"backend": "single", "parallel": {"data": 1}, "out": str(folder / "alone")}
    name = str(told["task"]["use"]).rpartition(":")[2]
    task: type[Task] = CharGPT if name == "CharGPT" else getattr(split_models, name)
    with join({**told, **changed}, task=task, overwrite=True) as run:
        for local_batch in run.batches():
            loss = run.step(local_batch).loss
            assert loss is not None
            losses.append(loss)
        (part,) = run.parts.values()
        named = [(name, p.detach().double()) for name, p in part.module.named_parameters()]
        return losses, {name: [float(p.sum()), float(p.square().sum())] for name, p in named}


def exported(told: Mapping[str, Any], folder: Path) -> Path:
    """Return the folder of an exported script that writes a sketch of its weights at the end."""
    script = export_script(source.load_given_config(told), "torchrun", folder / "made").folder
    text = (script / "train.py").read_text("utf-8")
    end = "    dist.destroy_process_group()\n"
    assert text.count(end) == 1
    (script / "train.py").write_text(text.replace(end, WEIGHTS + end), encoding="utf-8")
    return script


def compare(script: Path, told: Mapping[str, Any], folder: Path) -> None:
    """Require the losses and the weights of one process."""
    rows = [json.loads(line) for line in (script / "log.jsonl").read_text("utf-8").splitlines()]
    losses, weights = alone(told, folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=2e-6)
    seen: set[str] = set()
    for file in sorted(script.glob("weights*.json")):
        made = json.loads(file.read_text("utf-8"))
        seen |= set(made)
        for name, sketch in made.items():
            assert sketch == pytest.approx(weights[name], rel=2e-5, abs=2e-4), f"{file.name} {name}"
    assert seen == set(weights)


def play(told: Mapping[str, Any], ranks: int, folder: Path, forks: Forks) -> None:
    """Run a config's script on so many ranks where unipar is hidden, and require what one process computes."""
    script = exported(told, folder)
    (folder / "start.py").write_text(HIDES + FORGETS, encoding="utf-8")
    for done in forks.ranks([str(folder / "start.py")], script, {"OMP_NUM_THREADS": "1"}, size=ranks):
        assert done.returncode == 0, done.stdout + done.stderr
    compare(script, told, folder)


def run(script: Path, folder: Path) -> None:
    """Run a script by its command in an environment without unipar."""
    (folder / "sitecustomize.py").write_text(HIDES, encoding="utf-8")
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    variables = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(
        [str(script / "run.sh")], env=variables, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def require_clean(told: Mapping[str, Any], tmp_path: Path) -> None:
    """Require that ruff accepts the script of a config."""
    folder = export_script(source.load_given_config(told), "torchrun", tmp_path / "made").folder
    for words in (
        ["check", "--isolated", "--select", "E,F,I,UP,B,RUF", "--ignore", "B905", "--line-length", "120"],
        ["format", "--isolated", "--line-length", "120", "--diff"],
    ):
        command = [str(BIN / "ruff"), *words, *(file.name for file in folder.glob("*.py") if file.name != "task.py")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def refused(told: Mapping[str, Any], tmp_path: Path) -> str:
    """Return why a config is not exported."""
    with pytest.raises(UniparError) as e:
        export_script(source.load_given_config(told), "torchrun", tmp_path / "made")
    assert list(tmp_path.iterdir()) == []
    return str(e.value)
