"""List of checkpoints: what is shown of each, what is said of broken ones and of folders without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import save_on_ranks, save_two_steps
from unipar.checkpoint.overview.listing import checkpoint_table, list_checkpoints
from unipar.errors import CheckpointError
from unipar.utils.text import format_age


def test_whole_and_broken_ones_are_listed(tmp_path: Path) -> None:
    """Newest first; what the state tells, which are best, and of a broken one the fault."""
    state = {"time": 1000.0, "strategy": "native/parameters", "ranks": 2, "metrics": {"loss": 0.25, "bad": None}}
    save_on_ranks(tmp_path / "checkpoints", 1, state=state)
    save_on_ranks(tmp_path / "checkpoints", 3, state={**state, "best": [[1, 0.25]]})
    save_on_ranks(tmp_path / "checkpoints", 2)
    file = tmp_path / "checkpoints/step-00000002/shards/rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    three, two, one = list_checkpoints(tmp_path)
    assert (three.step, three.whole, three.strategy, three.ranks, three.best) == (
        3,
        True,
        "native/parameters",
        2,
        False,
    )
    assert (one.step, one.best, one.metrics) == (1, True, {"loss": 0.25, "bad": None})
    assert not two.whole
    assert two.why == f"{file}: {file.stat().st_size:,} bytes; manifest.json says {file.stat().st_size + 1:,}"
    lines = checkpoint_table([three, two, one], width=300, now=1500.0).splitlines()
    assert lines[0].split() == ["step", "age", "size", "saved", "by", "ranks", "best", "metrics"]
    assert " ".join(lines[1].split()) == "3 8 min 1.1 KiB native/parameters 2 loss 0.25, bad not finite"
    assert lines[2].split(maxsplit=1) == ["2", f"broken: {two.why}"]
    assert " ".join(lines[3].split()) == "1 8 min 1.0 KiB native/parameters 2 yes loss 0.25, bad not finite"


def test_ages() -> None:
    """An age is given in its largest unit."""
    assert [format_age(s) for s in (-1, 40, 300, 10800, 400000)] == ["0 s", "40 s", "5 min", "3 h", "4 days"]


def test_folders_without_checkpoints_are_named(tmp_path: Path) -> None:
    """A folder that is not there, and one that holds none, have a sentence each."""
    with pytest.raises(CheckpointError) as caught:
        list_checkpoints(tmp_path / "no")
    assert str(caught.value) == f"{tmp_path / 'no'}: no such folder; name a run folder, or a folder with checkpoints"
    with pytest.raises(CheckpointError) as caught:
        list_checkpoints(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no checkpoints: there is no folder such as step-00000500 in it, nor in its folder "
        "checkpoints; if the run saves elsewhere, name its folder in checkpoint.to"
    )
    save_two_steps(tmp_path)
    assert [one.step for one in list_checkpoints(tmp_path)] == [2, 1]
