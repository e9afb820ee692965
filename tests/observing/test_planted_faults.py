"""Faults planted in training scripts, found and named; and scripts in which nothing is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.observed_world import Variant, environment_of_command, observe_variants
from tests.support.planted_scripts import ALWAYS, FAULTS, HEALTHY, ON_FOUR_RANKS
from unipar.backend.observed_library import TrainingFault
from unipar.observing.guard import find_findings
from unipar.results.observation import TrainingFinding
from unipar.results.observed_rank import ObservedRank, read_observed_ranks

CONSEQUENCES: Final[Mapping[TrainingFault, set[TrainingFault]]] = {
    "unequal initial weights": {"unreduced gradients", "unequal copies"},
    "unreduced gradients": {"unequal copies"},
}
"""Faults that follow from another one."""

NOTED: Final[Mapping[str, set[TrainingFault]]] = {
    "an export by rank 0 at the end": {"unequal copies"},
    "weights averaged in each fourth step": {"unreduced gradients", "unequal copies"},
}
"""What is noted about healthy scripts."""

PLANTED: Final = [pytest.param(n, marks=[pytest.mark.sweep] * fault.sweep) for n, fault in FAULTS.items()]
SOUND: Final = [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.sweep]) for n in HEALTHY]


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Observe all scripts that the collected tests ask for, in one world."""
    asked = {item.name for item in request.session.items}
    variants: dict[str, Variant] = {
        **{n: fault.variant for n, fault in FAULTS.items() if f"test_a_planted_fault[{n}]" in asked},
        **{n: variant for n, variant in HEALTHY.items() if f"test_a_healthy_script[{n}]" in asked},
    }
    return observe_variants(variants, tmp_path_factory.mktemp("observed"))


def results_of(folder: Path) -> tuple[list[ObservedRank], list[TrainingFinding], tuple[int, ...]]:
    """Return what was seen of a script, the findings, and the exit codes of its ranks."""
    ranks = list(read_observed_ranks(folder))
    codes = tuple(int(folder.with_suffix(f".{rank.rank}.code").read_text("utf-8")) for rank in ranks)
    assert all(not rank.notes for rank in ranks), ranks[0].notes
    return ranks, find_findings(ranks), codes


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault(observed: Mapping[str, Path], name: str) -> None:
    """The fault is named with rank, step, parameter and the way out of the script's library; nothing else is wrong."""
    fault = FAULTS[name]
    ranks, findings, codes = results_of(observed[name])
    assert (len(ranks), codes) == (2, fault.codes)
    found = next((finding for finding in findings if finding.kind == fault.kind), None)
    assert found is not None, findings
    assert (found.severity, found.step, found.parameter, found.ranks) == (
        "note" if fault.note else "fault", fault.step, fault.parameter, fault.ranks
    )  # fmt: skip
    assert fault.says in found.says
    assert found.way_out
    assert fault.way_out in found.way_out
    kinds = {finding.kind for finding in findings if finding.severity == "fault"}
    assert kinds - {fault.kind} <= CONSEQUENCES.get(fault.kind, set())


@pytest.mark.parametrize("name", SOUND)
def test_a_healthy_script(observed: Mapping[str, Path], name: str) -> None:
    """Nothing is found in it, and its steps are."""
    ranks, findings, codes = results_of(observed[name])
    assert (len(ranks), codes) == (2, (0, 0))
    assert ({finding.kind for finding in findings}, [f for f in findings if f.severity == "fault"]) == (
        NOTED.get(name, set()), []
    )  # fmt: skip
    assert ranks[0].steps >= 6


@pytest.mark.sweep
def test_healthy_grids_of_four_ranks(tmp_path: Path) -> None:
    """Ranks that hold the same part are compared with each other alone."""
    observed = observe_variants(ON_FOUR_RANKS, tmp_path, size=4)
    for name, folder in observed.items():
        ranks, findings, codes = results_of(folder)
        assert (name, len(ranks), codes, findings) == (name, 4, (0,) * 4, [])


def test_the_command(tmp_path: Path) -> None:
    """`unipar observe --strict` prints the fault with its way out, and exits with 1 though the script did not."""
    script = tmp_path / "train.py"
    script.write_text(FAULTS["missing wrapper"].variant.text, "utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(
        [sys.executable, "-m", "unipar", "observe", "--strict", "--out", "out", "--", sys.executable, *torchrun],
        env=environment_of_command() | {"COLUMNS": "200", "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    text = " ".join(ran.stderr.split())
    assert (
        "fault, unreduced gradients, step 2: the optimizers of the ranks were given unequal gradients for 6 of 6 "
        "weights (0.weight, 0.bias, 1.weight and 3 more): they were not reduced over the ranks. Way out: wrap the "
        "model in DistributedDataParallel, "
    ) in text
    assert "compared without a finding: initial weights, " in text
