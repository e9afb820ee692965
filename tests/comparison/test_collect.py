"""One scaling out of comparisons that were jobs of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import CONFIG, Tiny
from unipar.comparison.compare import compare
from unipar.comparison.worlds.collect import collect_worlds
from unipar.errors import ReportError
from unipar.results.result_files import parse_scaling, read_mapping

pytestmark = pytest.mark.forked


def compared(out: Path, ranks: int) -> None:
    """What the job on so many ranks runs."""
    changes: dict[str, Any] = {"parallel.data": ranks, "out": str(out / f"worlds/world-{ranks}"), "train.steps": 5}
    compare({**CONFIG, "compare": {"memory": False}}, task=Tiny, strategies=["native/nothing"], overrides=changes)


def test_two_worlds(tmp_path: Path) -> None:
    """A row for each, speed-up in proportion to the smallest, losses that agree; files and a page."""
    compared(tmp_path, 1)
    compared(tmp_path, 2)
    found = collect_worlds(tmp_path)
    assert [(world.strategy, world.ranks, world.samples, world.micro) for world in found.worlds] == [
        ("native/nothing", 1, 8, 8),
        ("native/nothing", 2, 8, 4),
    ]
    assert found.code == 0
    assert found.agreements[0][1].within
    assert found.speed_up(found.worlds[0]) == 1.0
    file = tmp_path / "worlds/worlds.json"
    assert parse_scaling(file, read_mapping(file, "scaling")).worlds == found.worlds
    assert (tmp_path / "worlds/report.html").exists()
    shutil.rmtree(tmp_path / "worlds/world-2/compare")
    with pytest.raises(ReportError) as e:
        collect_worlds(tmp_path)
    assert str(e.value) == (
        f"{tmp_path}/worlds holds the results of 1 number of ranks; a scaling needs two or more (`unipar jobs` tells "
        "how the jobs stand)"
    )


def test_no_folder(tmp_path: Path) -> None:
    """Another than `submit scale` has named."""
    with pytest.raises(ReportError) as e:
        collect_worlds(tmp_path)
    assert str(e.value) == (f"{tmp_path}/worlds does not exist; give the folder that `unipar submit scale` has named")
