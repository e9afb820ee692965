"""Models and tasks that a mesh splits in few ways, or refuses to: cuts that are left, and the sentences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.world import ROOT
from unipar.errors import TaskError

pytestmark = pytest.mark.forked


def losses(folder: Path, task: str, parallel: dict[str, Any], **args: Any) -> list[float]:
    """Train a task of tests/support/unsplit.py for two steps; return its losses."""
    config = {
        "task": {"use": f"{ROOT}/tests/support/unsplit.py:{task}", "args": args},
        "device": "cpu",
        "parallel": {"data": 1, **parallel},
        "batch": {"total": 8, "micro": 4},
        "train": {"steps": 2, "optimizer": {"lr": 1e-2}},
        "log": {"every": 1},
        "out": str(folder / "-".join([task, *parallel])),
    }
    return [loss for _, loss in unipar.launch(config, quiet=True).losses]


def test_a_pipeline_is_cut_where_no_skip_crosses(tmp_path: Path) -> None:
    """The balanced cut would lose the skip; the one behind the first block does not, and the losses are right."""
    split = losses(tmp_path, "Skipping", {"pipeline": 2})
    assert split == pytest.approx(losses(tmp_path, "Skipping", {}), abs=1e-6)


@pytest.mark.parametrize(
    ("task", "parallel", "args", "sentence"),
    [
        (
            "Reading",
            {"pipeline": 2},
            {},
            "parallel.pipeline: 2 stages need 1 cut between blocks, and this model allows 0: elsewhere what blocks "
            "before the cut compute also reaches those behind it in other ways than the hidden states (a skip, an "
            "encoder's output, state kept on modules). Lower pipeline, put blocks that belong together into one "
            "(model.blocks, or the task's blocks()), or leave parallel.pipeline out",
        ),
        (
            "Skipping",
            {"pipeline": 3},
            {},
            "parallel.pipeline: 3 stages need 2 cuts between blocks, and this model allows 1 (before blocks.1): ",
        ),
        ("Skipping", {"pipeline": 2}, {"cuts": ["blocks.2"]}, "split as planned, the model is another: a loss of "),
        (
            "FrozenBelow",
            {"pipeline": 2},
            {},
            "stage 0 of the pipeline has no trained parameter (its blocks are blocks.0, blocks.1): name other cuts in "
            "the task's cuts(stages), or leave parallel.pipeline out",
        ),
        (
            "Misnamed",
            {"tensor": 2},
            {},
            "tensor() says column for 'blocks.*.query', and no module of a block has that name; name one of "
            "blocks.0.qkv, blocks.0.out, blocks.0.up, blocks.0.down, blocks.1.qkv, blocks.1.out, blocks.1.up, "
            "blocks.1.down and 8 more",
        ),
    ],
)
def test_it_is_refused(
    tmp_path: Path, task: str, parallel: dict[str, Any], args: dict[str, Any], sentence: str
) -> None:
    """Before any step, in a sentence with numbers and a way out."""
    with pytest.raises(TaskError, match=re.escape(sentence)):
        losses(tmp_path, task, parallel, **args)
