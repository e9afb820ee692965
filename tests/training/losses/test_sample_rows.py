"""Rows of all ranks in a loop of one's own: in the order of the batch, each sample once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from tests.support.gathering import Gathering
from tests.support.running import Line, running
from unipar.errors import TaskError

pytestmark = pytest.mark.forked


def _gathered(folder: Path, ranks: int, micro: int = 2, **parallel: Any) -> list[dict[str, Any]]:
    """Return what each rank got in three steps of four samples, of which the last has one."""
    made = {
        "task": {"use": f"{Path(__file__).parents[2]}/support/gathering.py:Gathering", "args": {"to": str(folder)}},
        "device": "cpu",
        "parallel": parallel,
        "batch": {"total": 4, "micro": micro},
        "data": {"shuffle": False},
        "train": {"steps": 3, "optimizer": {"name": "sgd", "lr": 0.01}},
        "out": str(folder / "run"),
    }
    unipar.launch(made, task=Gathering, quiet=True)
    return [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(ranks)]


BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_one_process(tmp_path: Path) -> None:
    """One process gets its own rows, without a second microbatch that has no sample of its own."""
    (got,) = _gathered(tmp_path, 1, data=1)
    assert got["share"] == BATCHES
    assert got["micro"] == [[[0, 0], [1, -1]], [[4, -4], [5, -5]], [[8, -8]]]
    assert got["rank"] == [[0.0] * 3] * 3
    assert got["after"] == [7.0]


def test_two_ranks(tmp_path: Path) -> None:
    """Both ranks get the rows of both; the last sample counts once, though each rank has run one."""
    one, two = _gathered(tmp_path, 2, data=2)
    assert [got.pop("error") for got in (one, two)] == [
        [
            f"run.gather() got rows of torch.float32 and the shape [..., {mine}] on rank {rank}, and of another dtype "
            f"or shape on rank {1 - rank}: cast them, or pad them to one shape, first"
        ]
        for rank, mine in ((0, 1), (1, 2))
    ]
    assert one == two
    assert one["share"] == BATCHES
    assert one["micro"] == [[[i, -i] for i in batch] for batch in BATCHES]
    assert one["chosen"] == [[True, True], [True, True], []]
    assert one["rank"] == [[0.0] * 3 + [1.0] * 4] * 3
    assert one["after"] == [7.0, 7.0]


def test_two_ranks_with_two_microbatches(tmp_path: Path) -> None:
    """The first microbatch of both ranks comes before the second, as in the batch of one process."""
    ranks = _gathered(tmp_path, 2, micro=1, data=2)
    assert [got["share"] for got in ranks] == [BATCHES] * 2


def test_four_ranks_of_which_two_share_samples(tmp_path: Path) -> None:
    """Ranks that hold halves of the same matrices have the same samples, which count once."""
    ranks = _gathered(tmp_path, 4, data=2, tensor=2)
    assert [got["share"] for got in ranks] == [BATCHES] * 4
    assert [got["rank"] for got in ranks] == [[[0.0] * 3 + [2.0] * 5] * 3] * 4


def test_rows_of_no_microbatch(tmp_path: Path) -> None:
    """Rows that are given for a share of several microbatches, and are not its samples', are refused."""
    with running(Line(), tmp_path) as run:
        share = next(run.batches())
        assert run.gather(torch.arange(3)).tolist() == [0, 1, 2]
        with pytest.raises(TaskError) as e:
            run.gather(torch.arange(3), share)
    assert str(e.value) == (
        "run.gather() got 3 rows of a local batch that has 4 in 2 microbatches: gather those of one microbatch at a "
        "time (run.gather(tensor, local_batch.micros[i]))"
    )
