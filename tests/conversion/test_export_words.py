"""Scripts that cut words over ranks, and what lies between matrices along the sequence: they train as one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.split_scripts import MODELS, TASKS, TOLD, compare, exported, play, refused, require_clean, run

SPLIT = {"options": {"native": {"vocabulary": "split"}}}


def told(task: str, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config."""
    return {**TOLD, "task": TASKS[task], "parallel": {"data": 1, **parallel}, **more}


@pytest.mark.parametrize(
    ("task", "parallel", "ranks"),
    [
        ("plain", {"tensor": 2}, 2),
        pytest.param("llama", {"tensor": 2, "data": 2, "shard": "gradients"}, 4, marks=pytest.mark.sweep),
        pytest.param("bert", {"tensor": 2}, 2, marks=pytest.mark.sweep),
    ],
)
def test_a_vocabulary_over_ranks(task: str, parallel: dict[str, Any], ranks: int, tmp_path: Path, forks: Forks) -> None:
    """Embedding and head have a part of the words on each rank, also where others share their bias."""
    play(told(task, parallel, **SPLIT), ranks, tmp_path, forks)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("task", "parallel"),
    [
        ("gpt2", {"tensor": 2, "data": 2, "shard": "parameters"}),
        ("gpt2", {"tensor": 2, "context": 2, "shard": "optimizer"}),
    ],
)
def test_a_vocabulary_by_the_command(task: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Started by torchrun, with a matrix that embedding and head share."""
    script = exported(told(task, parallel, **SPLIT), tmp_path)
    run(script, tmp_path)
    compare(script, told(task, parallel), tmp_path)


@pytest.mark.parametrize(("task", "clip"), [("plain", None), ("llama", 0.5)])
def test_a_script_with_a_vocabulary_is_clean(task: str, clip: float | None, tmp_path: Path) -> None:
    """Linter and formatter have nothing to say."""
    train = {**TOLD["train"], "clip": clip}
    require_clean(told(task, {"tensor": 2, "shard": "optimizer"}, train=train, **SPLIT), tmp_path)


@pytest.mark.parametrize(
    ("task", "parallel", "sentence"),
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
def test_a_vocabulary_is_refused(task: str, parallel: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Each with its reason; `<code>` stands for the number of that line."""
    lines = MODELS.read_text("utf-8").splitlines()
    expected = re.sub("<(.*?)>", lambda m: str(1 + next(i for i, line in enumerate(lines) if m[1] in line)), sentence)
    assert refused(told(task, parallel, **SPLIT), tmp_path) == expected


def test_attention_that_gathers(tmp_path: Path) -> None:
    """A script gathers keys and values whether the config says so or not; a ring, which it cannot do, is refused."""
    texts: list[str] = []
    for i, way in enumerate(("auto", "gather")):
        options = {"native": {"attention": way}}
        texts.append(
            (exported(told("dry", {"context": 2}, options=options), tmp_path / str(i)) / "train.py").read_text()
        )
    assert texts[0] == texts[1]
    assert "both = Gather.apply(torch.cat([key, value], -1), key.ndim - 2, sequences)" in texts[0]
    (tmp_path / "none").mkdir()
    ring = told("dry", {"context": 2}, options={"native": {"attention": "ring"}})
    assert refused(ring, tmp_path / "none") == (
        "native/nothing+context2: options.native.attention: ring: a script gathers keys and values of all ranks, which "
        "computes the same; say gather"
    )
