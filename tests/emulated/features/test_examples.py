"""Examples on the emulated device: what docs/examples.md says for a GPU, with smaller sizes, to the third step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.examples import EXAMPLES, SMALL
from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import losses_of_run
from unipar.run_folder.layout import read_launch_file

PAGE = ROOT / "docs" / "examples.md"

SMALLER: dict[str, dict[str, Any]] = {
    "causal_lm": {"task.args": {"hidden": 32, "layers": 2, "heads": 2, "context": 32, "words": 512}},
    "vit": {"task.args": {"size": 32, "patch": 16, "hidden": 32, "layers": 2, "heads": 2}, "data.workers": 2},
    "diffusion": {"task.args": {"size": 8, "patch": 2, "width": 32, "layers": 2, "heads": 2}, "data.workers": 2},
    "two_towers": {"task.args": {"channels": 4, "width": 32, "samples": 512}, "batch.total": 64},
}
"""Smaller values of keys that the page sets, by config."""

NEAR = {"fp32": 1e-5, "bf16-mixed": 0.03}
ROUNDED = {"lora": 1e-3}
"""Allowance of an example whose frozen weights are in bf16, whatever the precision."""


def settings_for_a_gpu(text: str) -> dict[str, dict[str, Any]]:
    """Return the settings that the page gives for a GPU, by config."""
    found: dict[str, dict[str, Any]] = {}
    for section in text.split("\n## "):
        for command in re.findall(r"For a GPU\b.*?`(--set [^`]*)`", section, re.DOTALL):
            (name, *_) = re.findall(r"configs/(\w+)\.yaml", section)
            words = re.findall(r"--set\s+(?:'([^']*)'|(\S+))", command)
            pairs = (" ".join((quoted or plain).split()).split("=", 1) for quoted, plain in words)
            found[name] = {key: yaml.safe_load(value) for key, value in pairs}
    return found


def words_of(name: str) -> tuple[list[str], str]:
    """Return an example's settings as words of a command, made smaller, and the precision."""
    given: dict[str, Any] = settings_for_a_gpu(PAGE.read_text("utf-8")).get(name, {"device": "cuda"})
    smaller = SMALLER.get(name, dict(SMALL.get(name, {})))
    if name in SMALLER:
        assert smaller.keys() <= given.keys()
        assert smaller["task.args"].keys() == given["task.args"].keys()
    made = {
        **given,
        **smaller,
        "parallel.data": 2,
        "train.steps": 3,
        "log.every": 1,
        "eval.every": 3,
        "eval.batches": 1,
    }
    words = [word for key, value in made.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return words, str(given.get("train.precision", "fp32"))


def test_the_page_has_sizes_of_four_examples() -> None:
    """Each begins with the device; all but the towers with the precision."""
    found = settings_for_a_gpu(PAGE.read_text("utf-8"))
    assert sorted(found) == sorted(SMALLER)
    assert {settings["device"] for settings in found.values()} == {"cuda"}
    assert found["vit"]["task.args"] == {"size": 224, "patch": 16, "hidden": 384, "layers": 12, "heads": 6}


@pytest.mark.emulated
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_begins(name: str, emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Two ranks train it with the losses of the CPU, and evaluate."""
    words, precision = words_of(name)
    losses: list[list[float]] = []
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        more = ["--set", f"out={out / 'run'}", "--set", f"device={device}"]
        done = emulated.unipar(["run", str(ROOT / f"configs/{name}.yaml"), *words, *more])
        assert done.returncode == 0, done.stderr
        settled = read_launch_file(out / "run")["settled"]
        assert (settled["device"], settled["sizes"]["ranks"]) == (device, 2)
        losses.append(losses_of_run(out))
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=ROUNDED.get(name, NEAR[precision]))
