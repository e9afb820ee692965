"""Options of the mesh: a vocabulary in parts, ways of attention; and what has no effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.world import ROOT
from unipar.errors import TaskError, Unsupported

pytestmark = pytest.mark.forked

WORDS = {"use": f"{ROOT}/tests/support/word_task.py:Words"}
LETTERS: dict[str, Any] = {
    "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
    "args": {"layers": 2, "width": 16, "heads": 2, "context": 8},
}


def losses(out: Path, task: dict[str, Any], parallel: dict[str, Any], **options: str) -> list[float]:
    """Train for three steps in two microbatches; return the losses."""
    config = {
        "task": task,
        "device": "cpu",
        "parallel": {"data": 1, **parallel},
        "batch": {"total": 8, "micro": 4},
        "train": {"steps": 3, "optimizer": {"lr": 1e-2}, "clip": 0.3},
        "options": {"native": options},
        "log": {"every": 1},
        "out": str(out),
    }
    return [loss for _, loss in unipar.launch(config, quiet=True).losses]


def test_a_vocabulary_in_parts(tmp_path: Path) -> None:
    """Embedding and head have half of the words on each rank; losses are those of whole ones."""
    split = losses(tmp_path / "split", WORDS, {"tensor": 2}, vocabulary="split")
    assert split == pytest.approx(losses(tmp_path / "whole", WORDS, {}), abs=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("attention", ["gather", "ring", "ulysses"])
def test_ways_of_attention(tmp_path: Path, attention: str) -> None:
    """Keys and values are gathered or pass from rank to rank, or positions are traded: losses are one process's."""
    split = losses(tmp_path / attention, LETTERS, {"context": 2}, attention=attention)
    assert split == pytest.approx(losses(tmp_path / "one", LETTERS, {}), abs=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("proof", ["whole", "blocks"])
def test_evaluation_of_layers_of_torch(tmp_path: Path, proof: str) -> None:
    """Without gradients they call no kernel for whole matrices: evaluations are those of one process."""
    config = {
        "task": {"use": f"{ROOT}/tests/support/unsplit.py:Encoded"},
        "device": "cpu",
        "batch": {"total": 8, "micro": 4},
        "train": {"steps": 2, "optimizer": {"lr": 1e-2}},
        "eval": {"every": 2, "batches": 1},
    }
    one = unipar.launch({**config, "parallel": {"data": 1}, "out": str(tmp_path / "one")}, quiet=True)
    native = {"options": {"native": {"proof": proof}}, "parallel": {"data": 1, "tensor": 2}}
    split = unipar.launch({**config, **native, "out": str(tmp_path / "split")}, quiet=True)
    assert [(step, pytest.approx(values, abs=2e-6)) for step, values in one.evals] == split.evals


@pytest.mark.sweep
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_eight_ranks(tmp_path: Path, shard: str) -> None:
    """Two stages of two parts of the data, whose matrices two ranks have each: losses are those of one process."""
    mesh = {"data": 2, "tensor": 2, "pipeline": 2, "shard": shard}
    split = losses(tmp_path / "mesh", LETTERS, mesh)
    assert split == pytest.approx(losses(tmp_path / "one", LETTERS, {"data": 2}), abs=2e-6)


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ({"context": 2}, "options.native.vocabulary: split has no effect: parallel.tensor is 1; leave it out"),
        (
            {"tensor": 2, "pipeline": 2},
            "options.native.vocabulary: split is not available with pipeline: embedding and head lie on different "
            "stages; leave it out",
        ),
    ],
)
def test_no_vocabulary_to_split(tmp_path: Path, parallel: dict[str, int], sentence: str) -> None:
    """The option is refused before any process starts."""
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        losses(tmp_path, WORDS, parallel, vocabulary="split")


def test_a_block_that_is_one_matrix(tmp_path: Path) -> None:
    """With one layer, the repeated modules of the model are matrices, which have nothing to be paired with."""
    one = {**LETTERS, "args": {**LETTERS["args"], "layers": 1}}
    sentence = (
        "parallel.tensor: 2 splits matrices within blocks, and each block of this model is one layer (layers.0.mlp.0, "
        "layers.0.mlp.2): name the modules around them in model.blocks, or leave tensor out"
    )
    with pytest.raises(TaskError, match=re.escape(sentence)):
        losses(tmp_path / "one", one, {"tensor": 2})
