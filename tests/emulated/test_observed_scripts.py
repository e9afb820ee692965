"""Faults planted in training scripts on the emulated device, found and named by `unipar observe`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.observed_world import Variant
from tests.support.planted_scripts import FAULTS, HEALTHY
from tests.support.softcuda.processes import EmulatedDevice
from unipar.observing.guard import find_findings
from unipar.observing.settings import SETTINGS_VARIABLE, ObserveSettings
from unipar.results.observation import TrainingFinding
from unipar.results.observed_rank import read_observed_ranks

DEVICE: Final[Mapping[str, str]] = {
    '"gloo"': '"nccl"',
    "rank = dist.get_rank()\n": "rank = dist.get_rank()\ntorch.cuda.set_device(rank)\n",
    "nn.Linear(16, 4))\n": "nn.Linear(16, 4)).cuda()\n",
    "    for x, y in loader:\n": "    for x, y in loader:\n        x, y = x.cuda(), y.cuda()\n",
}
"""Edits that make the plain script train on a device."""

INSTALL: Final = "from unipar.observing.process.start import install\ninstall()\n"
"""What the injected sitecustomize does when torch has been imported."""

PLANTED: Final[Mapping[str, tuple[str, str, int, str]]] = {
    "missing wrapper": ("unreduced gradients", "fault", 2, "0.weight"),
    "one weight changed": ("unequal copies", "fault", 8, "0.weight"),
    "one buffer changed": ("unequal copies", "fault", 8, "1.running_mean"),
    "same dropout": ("same dropout", "note", 2, ""),
}
"""Faults, and what is found: kind, severity, step and parameter."""

ALWAYS: Final = ("missing wrapper", "same dropout", "plain")
"""Scripts that are observed whenever tests run."""


def marked(names: Iterable[str]) -> list[Any]:
    """Return names of scripts, with a mark for those that only `make emulated` observes."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.emulated]) for name in names]


def observe(emulated: EmulatedDevice, folder: Path, edits: Mapping[str, str], **more: Any) -> list[TrainingFinding]:
    """Return the findings about the script with these edits on two devices."""
    settings = ObserveSettings(folder=folder, **more)
    code = INSTALL + Variant("plain.py", {**DEVICE, **edits}).text + "\nresult = done\n"
    variables = {SETTINGS_VARIABLE: settings.model_dump_json(), "UNIPAR_OBSERVE_RAISE": "1"}
    ran = emulated.ranks(code, variables=variables)
    assert [(run.code, run.result) for run in ran] == [(0, 12)] * 2, ran[0].stderr
    assert all(run.texts("race") == [] for run in ran)
    ranks = list(read_observed_ranks(folder))
    assert [(rank.device, rank.steps) for rank in ranks] == [("cuda", 12)] * 2
    return find_findings(ranks)


@pytest.mark.parametrize("name", marked(PLANTED))
def test_a_planted_fault(emulated: EmulatedDevice, tmp_path: Path, name: str) -> None:
    """A fault of a script on a device is named with step and parameter."""
    found = observe(emulated, tmp_path, FAULTS[name].variant.edits, memory=False)
    assert PLANTED[name] in [(finding.kind, finding.severity, finding.step, finding.parameter) for finding in found]
    assert all(finding.way_out for finding in found)


@pytest.mark.parametrize("name", marked(["plain", "dropout with other seeds", "steps that loss scaling skips"]))
def test_a_healthy_script(emulated: EmulatedDevice, tmp_path: Path, name: str) -> None:
    """Nothing is found in a script without a fault, whose memory is recorded as well."""
    edits = {old: new.replace('"cpu"', '"cuda"') for old, new in HEALTHY[name].edits.items()}
    assert observe(emulated, tmp_path, edits) == []
