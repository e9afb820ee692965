"""Examples with models of transformers and peft, and with a teacher: each trains in a small form and learns."""

from __future__ import annotations

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import unipar
from unipar.checkpoint.exporting.writing import ExportWish, export_checkpoint
from unipar.checkpoint.protocol.verifying import verify_checkpoint
from unipar.tracking.png import png_size

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

ROOT = Path(__file__).parents[2]
SIZES = {"hidden": 32, "layers": 1, "heads": 2, "context": 32, "words": 512}
VIT = {"size": 8, "patch": 2, "hidden": 32, "layers": 1, "heads": 2}
SHORT: dict[str, Any] = {"train.schedule.warmup": 5, "log.every": 30, "checkpoint.every": None}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's file lies in the working directory; examples import one another from their folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # else it warns in whatever this process forks later
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def run(name: str, **overrides: Any) -> unipar.Report:
    """Return the report of an example's config in one process, or as `overrides` say."""
    given = {"backend": "single", "parallel.data": 1, "out": f"runs/{name}"} | overrides
    return unipar.launch(ROOT / "configs" / f"{name}.yaml", overrides=given, quiet=True)


def exported(name: str, step: int, to: str) -> str:
    folder = Path("runs", f"{name}-{to}")
    export_checkpoint(
        verify_checkpoint(Path("runs", name, "checkpoints", f"step-{step:08d}")), folder, ExportWish(to=to)
    )
    return str(folder)


def told(task: Any, *models: Any) -> list[float]:
    """Return the loss of each model over the validation data as one batch."""
    rows = list(task.validation())
    assert len(rows) > 2
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        return [float(task.loss(model, batch)) for model in models]


def test_the_language_model_learns() -> None:
    """From a uniform guess to well below it; transformers loads what was exported, and its loss is that of the run."""
    report = run("causal_lm", **SHORT, **{"task.args": SIZES, "train.steps": 60, "eval.every": 60})
    losses = dict(report.losses)
    assert 6.1 < losses[1] < 6.4  # ln 512 = 6.24
    assert losses[60] < 5.5
    llama = AutoModelForCausalLM.from_pretrained(exported("causal_lm", 60, "hf"))
    (loss,) = told(importlib.import_module("causal_lm").CausalLM(**SIZES), llama)
    assert report.evals[-1][1]["loss"] == pytest.approx(loss, rel=1e-4)


def test_rows_are_packed() -> None:
    """Each text begins at place 0 with a label that is not predicted; its end is followed by the next text."""
    texts = [[5, 6, 0], [7, 8, 9, 1, 2, 3, 0], [4, 0]]
    packed: Any = importlib.import_module("causal_lm").Packed(texts, 4, shuffle=False)
    rows = [{name: column.tolist() for name, column in row.items()} for row in packed]
    assert rows == [
        {"input_ids": [5, 6, 0, 7], "position_ids": [0, 1, 2, 0], "labels": [-100, 6, 0, -100]},
        {"input_ids": [8, 9, 1, 2], "position_ids": [0, 1, 2, 3], "labels": [8, 9, 1, 2]},
        {"input_ids": [3, 0, 4, 0], "position_ids": [0, 1, 0, 1], "labels": [3, 0, -100, 0]},
    ]


def test_a_text_sees_itself_alone() -> None:
    """Another first text in a row changes nothing for the second; `prepare` makes a tokenizer that loses nothing."""
    task: Any = importlib.import_module("causal_lm").CausalLM(**SIZES)
    task.prepare()
    tokenizer = Tokenizer.from_file(str(task.file))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode(tokenizer.encode("for x in range(3): π").ids) == " for x in range(3): π"
    model: Any = task.model().eval()
    places = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad():
        one, other = (
            model(input_ids=torch.tensor([[*first, 9, 10]]), position_ids=places).logits[0, 3:]
            for first in ([5, 6, 0], [7, 8, 0])
        )
    assert torch.equal(one, other)


def test_an_adapter_over_the_language_model() -> None:
    """Training goes on from what the Llama has learned; peft loads the adapter, and its loss is that of the run."""
    run("causal_lm", **SHORT, **{"task.args": SIZES, "train.steps": 30, "eval.every": None})
    sizes: dict[str, Any] = SIZES | {"rank": 4, "base": exported("causal_lm", 30, "hf")}
    longer: dict[str, Any] = {"train.steps": 60, "eval.every": 60, "train.optimizer.lr": 3e-2}
    report = run("lora", **SHORT, **longer, **{"task.args": sizes})
    assert dict(report.losses)[1] < 5.9
    llama: Any = AutoModelForCausalLM.from_pretrained(sizes["base"], dtype=torch.bfloat16)
    tuned = PeftModel.from_pretrained(deepcopy(llama), exported("lora", 60, "peft"))
    before, after = told(importlib.import_module("lora").Lora(**sizes), llama, tuned)
    assert report.evals[-1][1]["loss"] == pytest.approx(after, rel=1e-4)
    assert before > after + 0.005


def test_a_student_learns_from_a_frozen_teacher() -> None:
    """The teacher learns in the first steps alone and is then the same to the last bit; the student comes near it."""
    report = run("distillation", **{"train.steps": 96, "checkpoint.every": 48, "log.every": 8,
                                    "task.args": {"channels": 4, "teacher": 16, "teacher_steps": 48}})  # fmt: skip
    assert report.parts["teacher"][-1][0] == 48
    assert report.parts["student"][0][0] == 49
    accuracy = dict(report.evals)[96]
    assert accuracy["teacher"] == dict(report.evals)[48]["teacher"] > 0.85
    assert accuracy["student"] > dict(report.evals)[48]["student"] + 0.4


def test_a_vision_transformer_learns_from_distorted_digits() -> None:
    """Its training sees other images in each epoch, its validation the same ones; it learns."""
    task: Any = importlib.import_module("vit").ViT(**VIT)
    seen, kept = task.data(), task.validation()
    assert (len(seen), len(kept), seen[0][0].shape) == (1500, 297, (1, 8, 8))
    assert not torch.equal(seen[0][0], seen[0][0])
    assert torch.equal(kept[0][0], kept[0][0])
    report = run("vit", **{"task.args": VIT, "train.epochs": None, "train.steps": 100, "train.schedule.warmup": 10,
                           "train.optimizer.lr": 5e-3, "eval.every": 100, "checkpoint": None})  # fmt: skip
    assert dict(report.losses)[1] == pytest.approx(2.30, abs=0.1)  # ln 10
    assert report.evals[-1][1]["accuracy"] > 0.25


def test_a_diffusion_model_draws_digits() -> None:
    """Its averaged weights draw a picture of four rows of ten digits, which is kept with the run."""
    sizes = {"width": 32, "layers": 1, "heads": 2}
    report = run("diffusion", **{"task.args": sizes, "train.epochs": None, "train.steps": 60, "eval.every": 60,
                                 "train.schedule.warmup": 5, "checkpoint": None, "log.every": 20})  # fmt: skip
    losses = dict(report.losses)
    assert losses[60] < 0.7 * losses[1]
    ((step, files),) = report.images
    assert (step, [*files]) == (60, ["samples"])
    png = files["samples"].read_bytes()
    assert png_size(png) == (80, 32)
