"""The pages "From ...": both programs of each diff run on two ranks, and their losses agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.world import ROOT
from unipar.config import config_source as source
from unipar.conversion.import_config import import_library_config
from unipar.results.run_report import Report

PAGES = ("ddp", "accelerate", "fabric", "deepspeed", "hf-trainer")
TORCHTUNE = ROOT / "build/torchtune"
"""Folder into which `make torchtune` puts what the page about it needs."""


def block(page: str, language: str) -> str:
    text = (ROOT / f"docs/from-{page}.md").read_text("utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert len(found) == 1
    return found[0]


def sides(diff: str) -> tuple[str, str]:
    """The program before and the program after."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-", ""))
    after = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+", ""))
    return before, after


def _start(page: str, folder: Path, forks: Forks) -> list[subprocess.CompletedProcess[str]]:
    """Return what the program before printed in two ranks, as a launcher would start them; Fabric starts its own."""
    environment = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    if page == "torchtune":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "before.py"]
        return [_new_python(words, folder, environment)]
    if page != "fabric":
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        return forks.ranks(["before.py"], folder, environment | path)
    return [_new_python(["before.py"], folder, environment)]


def _new_python(
    words: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python anew: Fabric starts ranks of its own, and torchtune takes another torchao than forks may have."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize(
    "page",
    [
        "ddp",
        *(pytest.param(page, marks=pytest.mark.sweep) for page in PAGES if page != "ddp"),
        pytest.param("torchtune", marks=pytest.mark.slow),
    ],
)
def test_the_same_losses(page: str, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after, step by step; torchtune is found in a folder of its own."""
    if page == "torchtune":
        assert TORCHTUNE.is_dir(), "make torchtune"
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TORCHTUNE)]))
    before, after = sides(block(page, "diff"))
    (tmp_path / "before.py").write_text(before, encoding="utf-8")
    (tmp_path / "train.py").write_text(after, encoding="utf-8")
    (tmp_path / "train.yaml").write_text(block(page, "yaml"), encoding="utf-8")
    if page == "deepspeed":
        (tmp_path / "ds_config.json").write_text(block(page, "json"), encoding="utf-8")
    theirs = _start(page, tmp_path, forks)
    ours = _new_python(["train.py"], tmp_path) if page == "torchtune" else forks.python(["train.py"], tmp_path)
    assert ours.returncode == 0, ours.stderr
    losses = dict(re.findall(r"^(\d+) ([\d.]+)$", theirs[0].stdout, re.MULTILINE))
    assert len(losses) == 20, theirs  # not their exit code: gloo's threads may abort a process that is done
    report = Report.read(tmp_path / "runs/train")
    assert [step for step, _ in report.losses] == list(range(1, 21))
    assert [loss for _, loss in report.losses] == pytest.approx([float(v) for v in losses.values()], rel=1e-6)


def test_the_pages_config_is_what_import_writes(tmp_path: Path) -> None:
    """`unipar import` of the page's ds_config.json, with what the file does not say."""
    (tmp_path / "ds_config.json").write_text(block("deepspeed", "json"), encoding="utf-8")
    (tmp_path / "train.yaml").write_text(block("deepspeed", "yaml"), encoding="utf-8")
    made = import_library_config(
        tmp_path / "ds_config.json", ["train.steps=20", "train.schedule={name: cosine}"]
    ).config
    page = source.load_config_file(tmp_path / "train.yaml").config
    assert (made.backend, made.parallel, made.train) == (page.backend, page.parallel, page.train)
    assert made.batch.settle(2) == page.batch.settle(2)


GPT2 = """    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    sizes |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
"""


@pytest.mark.sweep
def test_the_trainer_counts_a_token_too_many(tmp_path: Path, forks: Forks) -> None:
    """With GPT2LMHeadModel its loss is 120/136 of the mean over tokens: the first token of each sequence counts too."""
    before, after = (
        re.sub(r"    sizes = .*\n.*\n", GPT2, side).replace(
            "LlamaConfig, LlamaForCausalLM", "GPT2Config, GPT2LMHeadModel"
        )
        for side in sides(block("hf-trainer", "diff"))
    )
    (tmp_path / "before.py").write_text(before.replace("max_steps=20", "max_steps=1"), encoding="utf-8")
    (tmp_path / "train.py").write_text(after, encoding="utf-8")
    config = block("hf-trainer", "yaml").replace("steps: 20", "steps: 1").replace("warmup: 5", "warmup: 1")
    (tmp_path / "train.yaml").write_text(config, encoding="utf-8")
    theirs = _start("hf-trainer", tmp_path, forks)[0]
    ours = forks.python(["train.py"], tmp_path)
    assert ours.returncode == 0, ours.stderr
    (said,) = re.findall(r"^1 ([\d.]+)$", theirs.stdout, re.MULTILINE)
    ((_, mean),) = Report.read(tmp_path / "runs/train").losses
    assert float(said) / mean == pytest.approx(120 / 136, rel=1e-6)
