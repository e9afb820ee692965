"""Scripts that cut words over ranks, and what lies between matrices along the sequence: they train as one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.split_scripts import MODELS, TASKS, TOLD, compare, exported, play, refused, require_clean, run
from unipar.config import config_source as source
from unipar.conversion.export import export_script

SPLIT = {"options": {"native": {"vocabulary": "split"}}}
PARTS = {"tensor": 2, "sequence": True}


def told(task: str, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config; the task is one of the list, or a kind of layer."""
    chosen = TASKS.get(task, {"use": f"{MODELS}:Kinds", "args": {"kind": task}})
    return {**TOLD, "task": chosen, "parallel": {"data": 1, **parallel}, **more}


def text_of(config: dict[str, Any], folder: Path) -> str:
    """Return the script of a config."""
    return (export_script(source.load_given_config(config), "torchrun", folder).folder / "train.py").read_text("utf-8")


def sentence_of(text: str) -> str:
    """Return a sentence in which the number of a line stands for `<code>`."""
    lines = MODELS.read_text("utf-8").splitlines()
    return re.sub("<(.*?)>", lambda m: str(1 + next(i for i, line in enumerate(lines) if m[1] in line)), text)


@pytest.mark.parametrize(
    ("task", "parallel", "ranks"),
    [
        ("dropped", PARTS, 2),
        pytest.param("plain", {"tensor": 2}, 2, marks=pytest.mark.sweep),
        pytest.param("bert", {"tensor": 2}, 2, marks=pytest.mark.sweep),
        pytest.param("llama", {"tensor": 2, "data": 2, "shard": "gradients"}, 4, marks=pytest.mark.sweep),
        pytest.param("gpt2", {**PARTS, "data": 2, "shard": "parameters"}, 4, marks=pytest.mark.sweep),
    ],
)
def test_a_vocabulary_over_ranks(task: str, parallel: dict[str, Any], ranks: int, tmp_path: Path, forks: Forks) -> None:
    """Embedding and head have a part of the words on each rank, also where others share their parameters."""
    play(told(task, parallel, **SPLIT), ranks, tmp_path, forks)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("task", "parallel", "ranks"),
    [
        ("gpt", PARTS, 2),
        ("bert", {**PARTS, "tensor": 4}, 4),
        ("llama", {**PARTS, "context": 2, "shard": "optimizer"}, 4),
        ("gpt2", {**PARTS, "pipeline": 2}, 4),
        ("dropped", {**PARTS, "pipeline": 2, "data": 2, "shard": "parameters", "schedule": "gpipe"}, 8),
    ],
)
def test_hidden_states_in_parts(task: str, parallel: dict[str, Any], ranks: int, tmp_path: Path, forks: Forks) -> None:
    """Split along the sequence between cut matrices, of any length; unipar is hidden."""
    play(told(task, parallel), ranks, tmp_path, forks)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("task", "parallel", "more"),
    [
        ("gpt2", {"tensor": 2, "context": 2, "shard": "optimizer"}, SPLIT),
        ("gpt2", {**PARTS, "data": 2, "shard": "parameters"}, {}),
    ],
)
def test_by_the_command(task: str, parallel: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    """Started by torchrun, with a matrix that embedding and head share."""
    script = exported(told(task, parallel, **more), tmp_path)
    run(script, tmp_path)
    compare(script, told(task, parallel), tmp_path)


@pytest.mark.parametrize(
    ("task", "parallel", "clip"),
    [
        ("plain", {"tensor": 2, "shard": "optimizer"}, None),
        ("dropped", {**PARTS, "shard": "parameters"}, 0.5),
        ("llama", PARTS, None),
        ("gpt2", {**PARTS, "pipeline": 2}, 0.5),
    ],
)
def test_such_a_script_is_clean(task: str, parallel: dict[str, Any], clip: float | None, tmp_path: Path) -> None:
    """Linter and formatter have nothing to say."""
    options = {} if "pipeline" in parallel else SPLIT
    require_clean(told(task, parallel, train={**TOLD["train"], "clip": clip}, **options), tmp_path)


def test_the_tables_of_parts(tmp_path: Path) -> None:
    """They say before or behind which modules the sequence is made whole, and which parameters act on parts."""
    assert """        numbers=("heads", "width"),
        dropouts={"drop": (-1, 1)},
        gathers={"up": 0},
        behind=("norm",),
        masks=("leave",),
        partial=("norm.weight", "norm.bias", "out.bias", "down.bias"),
""" in text_of(told("dropped", PARTS), tmp_path / "own")
    text = text_of(told("llama", PARTS), tmp_path / "llama")
    assert (
        """        gathers={"self_attn": "hidden_states", "mlp.gate_proj": 0, "mlp.up_proj": 0},
        partial=("input_layernorm.weight", "post_attention_layernorm.weight"),
"""
        in text
    )
    assert "HIDDEN = 0  # place or name of a block's hidden states among its arguments" in text


@pytest.mark.parametrize(
    ("kind", "parallel", "sentence"),
    [
        (
            "plain",
            {"tensor": 4},
            "a split vocabulary: 4 ranks do not divide the 62 words of words; make it 64 or leave the option out",
        ),
        (
            "plain",
            {"tensor": 2, "pipeline": 2},
            "native/nothing+tensor2+pipeline2: options.native.vocabulary: split is not available with pipeline: "
            "embedding and head lie on different stages; leave it out",
        ),
        (
            "scaled",
            {"tensor": 2},
            "native/nothing+tensor2: options.native.vocabulary: words is a ScaledWords, which reads words in a way of "
            "its own, and a script cuts a plain nn.Embedding: leave the option out of the export",
        ),
        (
            "reused",
            {"tensor": 2},
            "native/nothing+tensor2: options.native.vocabulary: words.weight is used outside of words (linear at "
            "split_models.py:<F.linear(x, self.words.weight)>), where a rank has some of its words only: call words "
            "instead, or leave the option out of the export",
        ),
    ],
)
def test_a_vocabulary_is_refused(kind: str, parallel: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Each with its reason."""
    assert refused(told(kind, parallel, **SPLIT), tmp_path) == sentence_of(sentence)


@pytest.mark.parametrize(
    ("kind", "parallel", "sentence"),
    [
        (
            "whole",
            PARTS,
            "native/nothing+tensor2+sequence: parallel.sequence: layers.0 does not run on parts of a sequence as a "
            "script splits it (multi_head_attention_forward at split_models.py:<self.attention(normed> needs all "
            "positions): ask a cut matrix's output for sizes, or compute with the whole in a module of its own, or "
            "leave sequence out of the export (--set parallel.sequence=false)",
        ),
        (
            "top",
            PARTS,
            "native/nothing+tensor2+sequence: parallel.sequence: layers.0 does not run on parts of a sequence as a "
            "script splits it (shape '[2, 8, 2, 8]' is invalid for input of size 512, split_models.py:<heads, 8).tr>): "
            "ask a cut matrix's output for sizes, or compute with the whole in a module of its own, or leave sequence "
            "out of the export (--set parallel.sequence=false)",
        ),
        (
            "longer",
            PARTS,
            "native/nothing+tensor2+sequence: parallel.sequence: layers.0 does not run on parts of a sequence as a "
            "script splits it (the result is not that of the whole): ask a cut matrix's output for sizes, or compute "
            "with the whole in a module of its own, or leave sequence out of the export (--set "
            "parallel.sequence=false)",
        ),
        (
            "functional parts",
            PARTS,
            "native/nothing+tensor2+sequence: parallel.sequence: layers.0 calls dropout at "
            "split_models.py:<F.dropout(out, 0.1> on a part of the sequence, and a script cuts the masks of nn.Dropout "
            "modules only: use one there, or set its rate to 0",
        ),
        (
            "between",
            PARTS,
            "native/nothing+tensor2+sequence: parallel.sequence: hidden states must go straight from block to block, "
            "each called once, and layers.1 is given something else: change that between blocks, or leave sequence "
            "out of the export (--set parallel.sequence=false)",
        ),
        (
            "dropped",
            {**PARTS, "context": 2},
            "native/nothing+tensor2+context2+sequence: parallel.context: layers.0.drop drops elements of what tensor "
            "has cut, and a script does not cut its masks along the sequence as well: set its rate to 0, or leave one "
            "of both axes out of the export",
        ),
    ],
)
def test_parts_are_refused(kind: str, parallel: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Each with its reason, its line and the way out."""
    assert refused(told(kind, parallel), tmp_path) == sentence_of(sentence)


def test_attention_that_gathers(tmp_path: Path) -> None:
    """A script gathers keys and values whether the config says so or not; other ways are refused."""
    texts = [
        text_of(told("dry", {"context": 2}, options={"native": {"attention": way}}), tmp_path / way)
        for way in ("auto", "gather")
    ]
    assert texts[0] == texts[1]
    assert "    surround(model, BLOCKS, sequences=sequences)\n" in texts[0]
    (tmp_path / "none").mkdir()
    for way in ("ring", "ulysses"):
        other = told("dry", {"context": 2}, options={"native": {"attention": way}})
        assert refused(other, tmp_path / "none") == (
            f"native/nothing+context2: options.native.attention: {way}: a script gathers keys and values of all ranks, "
            "which computes the same; say gather"
        )
