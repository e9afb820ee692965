"""Closed forms of native beside its own engines: DDP, ZeroRedundancyOptimizer and FSDP2, at any number of ranks."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.native_library import Case
from tests.support.world import ROOT
from unipar.launcher.processes.group import WorkerGroup

pytestmark = pytest.mark.forked


def differences(cases: Sequence[Case], folder: Path) -> list[list[str]]:
    """Return for each case what is held or sent otherwise than planned."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(folder, 1, "tests.support.native_library:run", environment={"PYTHONPATH": path}) as workers:
        workers.wait()
    return json.loads((folder / "compared.json").read_text("utf-8"))


FROZEN, TIED, LATE, LARGE = 5, 182, 55, 135
"""Seeds of models: no gradient arrives at the first of three blocks; the head is the embedding; the first block is
reduced when the backward is over; 3.6 MiB of gradients."""

CASES = [
    Case(FROZEN, "native/parameters", 2, staged=True),
    Case(FROZEN, "native/gradients", 64, staged=True),
    Case(FROZEN, "native/nothing", 64, microbatches=2),
    Case(FROZEN, "native/optimizer", 3),
    Case(TIED, "native/gradients", 8, shard_over=2, microbatches=2),
    Case(TIED, "native/parameters", 3, blocks="none", staged=True),
    Case(TIED, "native/optimizer", 3, precision="bf16-master", microbatches=2),
    Case(LATE, "native/parameters", 64, staged=True),
    Case(FROZEN, "native/parameters", 3, staged=True, ema=True),
    Case(TIED, "native/optimizer", 3, ema=True),
    Case(LARGE, "native/nothing", 2, wide=12, options={"bucket_cap_mb": 1}),
]
MORE = [
    Case(FROZEN, "native/parameters", 1000, microbatches=2),
    Case(FROZEN, "native/parameters", 1),
    Case(TIED, "native/parameters", 8, staged=True),
    Case(TIED, "native/nothing", 1000),
    Case(TIED, "native/optimizer", 64),
    Case(TIED, "native/parameters", 3, precision="bf16-master", staged=True),
    Case(TIED, "native/gradients", 8, microbatches=2, ema=True),
    Case(TIED, "native/optimizer", 3, precision="bf16-master", ema=True),
    Case(FROZEN, "native/nothing", 2, ema=True),
    Case(LARGE, "native/nothing", 2, wide=12, options={"bucket_cap_mb": 1, "find_unused_parameters": True}),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.sweep)], ids=["some", "more"])
def test_as_torch_does(cases: list[Case], tmp_path: Path) -> None:
    """Its own code, on one rank of a world that only pretends, holds and sends to the byte what is planned."""
    for case, found in zip(cases, differences(cases, tmp_path), strict=True):
        assert found == [], case


def draw_case(draw: random.Random, seed: int) -> Case:
    """Return a case of a model at random: any strategy, number of ranks, precision, microbatches, blocks and groups."""
    strategy = draw.choice(["nothing", "optimizer", "gradients", "parameters", "parameters"])
    ranks = draw.choice([1, 2, 3, 8, 64, 1000])
    is_copied = strategy != "nothing" and ranks in (8, 64) and draw.random() < 0.2
    return Case(
        seed,
        f"native/{strategy}",
        ranks,
        draw.choice([1, 1, 2, 3]),
        "fp32" if strategy == "nothing" else draw.choice(["fp32", "fp32", "bf16-master"]),
        draw.choice(["auto", "auto", "none"]),
        draw.choice(["all", "matrices"]),
        draw.choice([2, 4]) if is_copied else None,
        staged=draw.random() < 0.5,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4))
def test_as_torch_does_at_random(seed: int, tmp_path: Path) -> None:
    """Shapes, frozen, tied and unused parameters, worlds, precisions, accumulation and groups are drawn from a seed."""
    draw = random.Random(seed)
    cases = [draw_case(draw, 20 * seed + number // 4) for number in range(80)]
    for case, found in zip(cases, differences(cases, tmp_path), strict=True):
        assert found == [], case
