"""The errors of the corpus in a model of which only parts are trained: each is named, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.cases import CASES
from tests.corpus.verifying import Verified, verify_task
from tests.support.forks import Forks

ALWAYS = ("clip-per-group",)
"""Errors that are verified whenever tests run; the others are in the sweeps."""

GRADIENTS = ("clip-per-group", "replicas-counted", "bias-gradient-divided", "tied-apart")
"""Errors of norms and gradients, in strategies of each kind."""

TEXTS = [name for name, case in CASES.items() if case.task == "Texts"]

OTHERS: dict[str, str] = {}
"""Kinds that are named otherwise than in a model that is trained as a whole, by case."""


@pytest.fixture(scope="module")
def verified(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> dict[str, Verified]:
    """Verify the cases that the collected tests ask for."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if "in_part" in item.name)
    asked = {call.params.get("name") for call in calls if call is not None}
    folder = tmp_path_factory.mktemp("partly")
    return verify_task(forks, folder, "PartlyTrainedTexts", [name for name in TEXTS if name in asked])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.sweep]) for n in TEXTS])
def test_an_error_is_named_where_a_model_is_trained_in_part(verified: dict[str, Verified], name: str) -> None:
    """With frozen, unused, tied and single-element parameters the kind is that of a model that is trained as a whole.

    That the same engines agree without an error is required by `verify_task`.
    """
    found = verified[name]
    assert found.verdict.outcome == "disagrees", found.verdict
    assert found.finding.kind == OTHERS.get(name, CASES[name].kind), found.finding.says


@pytest.mark.sweep
@pytest.mark.parametrize("part", ["frozen", "unused", "single"])
def test_each_of_these_parts_alone(part: str, tmp_path: Path, forks: Forks) -> None:
    """Errors of norms and gradients are named with each kind of parameter by itself."""
    found = verify_task(forks, tmp_path, "PartlyTrainedTexts", GRADIENTS, parts=[part])
    assert {name: each.finding.kind for name, each in found.items()} == {name: CASES[name].kind for name in GRADIENTS}
