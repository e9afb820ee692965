"""The table of refusals: each line of it is met by some config, and by no config without the trait."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.backend.checks import check_can_run
from unipar.backend.refusals import REFUSALS, SCRIPT, TRAITS, conditions_of, refusals_met
from unipar.config import Config
from unipar.config.sections.optimizer import OPTIMIZERS
from unipar.errors import Unsupported

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "whole_matrices": ("tasks.md", "Optimizers by whole matrices"),
    "moments_in_blocks": ("memory.md", "Moments of 8 bits"),
    "moments_in_bf16": ("memory.md", "Moments in bf16"),
    "train.precision: fp8": ("backends.md", "Precisions"),
    "train.precision: fp8-rowwise": ("backends.md", "Precisions"),
}
"""Page and section about the optimizers with a trait, or about a precision."""


def config_with(optimizer: str) -> Config:
    """Return a config in which every key is set that some optimizer refuses."""
    train = {"steps": 8, "optimizer": {"name": optimizer}, "precision": "fp64", "local_steps": 2}
    parallel = {"data": 1, "tensor": 2, "shard": "parameters"}
    sections = {"batch": {"total": 8, "micro": 2}, "parallel": parallel, "model": {"offload": "parameters"}}
    return Config.model_validate({**sections, "train": train})


@pytest.mark.parametrize(("trait", "carrier"), [(trait, carrier) for trait in TRAITS for carrier in REFUSALS[trait]])
def test_each_refusal_is_met_by_the_optimizers_that_have_its_trait(trait: str, carrier: str) -> None:
    """A trait or a key that does not exist would never be met."""
    met: set[str] = set()
    for name in OPTIMIZERS:
        conditions = conditions_of(config_with(name)) | {SCRIPT: ""}
        sentences = list(refusals_met(conditions, {trait: {carrier: REFUSALS[trait][carrier]}}))
        assert [s for s in sentences if not s.startswith(f"train.optimizer.name: {name} ") or "{" in s] == []
        met |= {name} if sentences else set()
    assert met == {name for name, kind in OPTIMIZERS.items() if getattr(kind, trait)} != set()


@pytest.mark.parametrize(("trait", "carrier"), [(trait, carrier) for trait, row in REFUSALS.items() for carrier in row])
def test_the_docs_name_each_refusal(trait: str, carrier: str) -> None:
    """The section about a feature names what cannot carry it."""
    file, head = SECTIONS[trait]
    section = (ROOT / "docs" / file).read_text("utf-8").partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    assert {SCRIPT: "export", "parallel.context": "parallel.context", "train.precision: fp64": "fp64"}.get(
        carrier, f"`{carrier}`"
    ) in section


BY_HAND = (
    "converts linear layers by torchao and finds those that leave fp8, which a script does not: export with "
    "bf16-mixed, and call torchao.float8.convert_to_float8_training in train.py"
)


@pytest.mark.parametrize(
    ("precision", "sentences"),
    [
        (
            "fp8",
            [
                "train.precision: fp8 is not available with parallel.context: 2: one scale of a tensor covers all "
                "positions, and each of 2 ranks has a part of them; take fp8-rowwise, with a scale for each position",
                f"train.precision: fp8 {BY_HAND}",
            ],
        ),
        ("fp8-rowwise", [f"train.precision: fp8-rowwise {BY_HAND}"]),
    ],
)
def test_what_does_not_go_with_fp8(precision: str, sentences: list[str]) -> None:
    """A scale over positions that several ranks have, and a script."""
    sections = {"batch": {"total": 8, "micro": 2}, "parallel": {"data": 1, "context": 2}}
    config = Config.model_validate({**sections, "train": {"steps": 8, "precision": precision}})
    assert list(refusals_met(conditions_of(config) | {SCRIPT: ""})) == sentences


def test_a_device_that_neither_has_fp8_nor_emulates_it() -> None:
    """Named before any process starts."""
    sections = {"device": "mps", "parallel": {"data": 1}, "batch": {"total": 8, "micro": 2}}
    config = Config.model_validate({**sections, "train": {"steps": 8, "precision": "fp8"}})
    with pytest.raises(Unsupported) as caught:
        check_can_run(config)
    assert (
        "train.precision: fp8 needs CUDA, or the CPU for trials, and device is mps: take bf16-mixed"
        in caught.value.reasons
    )
