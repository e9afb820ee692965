"""Embedding and head cut over the vocabulary, beside whole ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from unipar_mesh.tensor.vocabulary import Vocabulary, find_vocabulary

from tests.support.tensor_inside import LOSSES, Words
from tests.support.world import ROOT
from unipar.errors import TaskError
from unipar.launcher.processes.group import WorkerGroup

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # torch's own, while it is imported


def test_losses_of_a_split_vocabulary(tmp_path: Path) -> None:
    """Losses and gradients are the whole one's, and cross entropy gathers nothing; other losses gather and are right,
    as is the best word. So it is in exported scripts."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(tmp_path, 2, "tests.support.tensor_inside:words", environment={"PYTHONPATH": path}) as workers:
        workers.wait()
    for rank in range(2):
        said: dict[str, Any] = json.loads((tmp_path / f"said-{rank}.json").read_text("utf-8"))
        assert len(said) == 4 * len(LOSSES)
        assert {name: off for name, (off, _, _) in said.items() if off > 2e-6} == {}
        assert {name for name, (_, _, right) in said.items() if not right} == set()
        times = {name.partition(": ")[2]: times for name, (_, times, _) in said.items()}
        assert {name: n > 0 for name, n in times.items()} == {name: name.startswith("gathered") for name in LOSSES}


def test_a_vocabulary_that_cannot_be_split() -> None:
    """The sentence has the numbers and the way out."""
    assert find_vocabulary(Words(tied=True, bias=False), [], 2) == Vocabulary(32, "table", "head")
    with pytest.raises(TaskError) as e:
        find_vocabulary(Words(tied=True, bias=False), [], 3)
    assert str(e.value) == (
        "a split vocabulary: 3 ranks do not divide the 32 words of table; make it 33 or leave the option out"
    )
    with pytest.raises(TaskError) as e:
        find_vocabulary(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 9)), [], 2)
    assert str(e.value) == (
        "a split vocabulary needs one embedding and one linear layer with as many outputs outside the blocks; the "
        "model has 0 such pairs: leave the option out"
    )
    with pytest.raises(TaskError) as e:
        find_vocabulary(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 8)), [], 2)
    assert str(e.value) == (
        "a split vocabulary: 0 has max_norm, scale_grad_by_freq or sparse, which look at all words; leave them or the "
        "option out"
    )
