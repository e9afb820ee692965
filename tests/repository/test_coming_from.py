"""Sections of docs/migrate.md: the old and the new script run on two ranks, and their losses agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.transcript import blocks, changed
from tests.support.world import ROOT
from unipar.config import config_source as source
from unipar.conversion.import_config import import_library_config
from unipar.results.run_report import Report

PAGE = (ROOT / "docs/migrate.md").read_text("utf-8")
SECTIONS = {
    "ddp": "DDP",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
    "deepspeed": "DeepSpeed",
    "hf-trainer": "the Hugging Face Trainer",
    "torchtune": "torchtune",
}
TORCHTUNE = ROOT / "build/torchtune"
"""Folder into which `make torchtune` puts what the section about it needs."""


def files_of(library: str) -> dict[str, str]:
    """Return the files of a section, those of the page's beginning where it has none of its own; the old script first.

    A diff changes train.yaml.
    """
    beginning, *parts = PAGE.split("\n## From ")
    (section,) = (part for part in parts if part.startswith(f"{SECTIONS[library]}\n"))
    files: dict[str, str] = {}
    for text in (beginning, section):
        for block in blocks(text):
            match block.language:
                case "python" | "yaml":
                    files[block.text.partition("\n")[0].removeprefix("# ")] = block.text
                case "json":
                    files["ds_config.json"] = block.text
                case "diff":
                    files["train.yaml"] = changed(files["train.yaml"], block.text)
                case _:
                    pass
    (old,) = (name for name in files if name not in ("mine.py", "train.py", "train.yaml", "ds_config.json"))
    return {"before.py": files.pop(old), **files}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


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
        *(pytest.param(page, marks=pytest.mark.sweep) for page in SECTIONS if page not in ("ddp", "torchtune")),
        pytest.param("torchtune", marks=pytest.mark.slow),
    ],
)
def test_the_same_losses(page: str, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after, step by step; torchtune is found in a folder of its own."""
    if page == "torchtune":
        assert TORCHTUNE.is_dir(), "make torchtune"
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TORCHTUNE)]))
    write(tmp_path, files_of(page))
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
    write(tmp_path, files_of("deepspeed"))
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
    files = files_of("hf-trainer")
    model = re.sub(r"    sizes = .*\n.*\n", GPT2, files["mine.py"])
    files["mine.py"] = model.replace("LlamaConfig, LlamaForCausalLM", "GPT2Config, GPT2LMHeadModel")
    files["before.py"] = files["before.py"].replace("max_steps=20", "max_steps=1")
    files["train.yaml"] = files["train.yaml"].replace("steps: 20", "steps: 1").replace("warmup: 5", "warmup: 1")
    write(tmp_path, files)
    theirs = _start("hf-trainer", tmp_path, forks)[0]
    ours = forks.python(["train.py"], tmp_path)
    assert ours.returncode == 0, ours.stderr
    (said,) = re.findall(r"^1 ([\d.]+)$", theirs.stdout, re.MULTILINE)
    ((_, mean),) = Report.read(tmp_path / "runs/train").losses
    assert float(said) / mean == pytest.approx(120 / 136, rel=1e-6)
