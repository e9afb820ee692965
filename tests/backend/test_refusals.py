"""The table of refusals: each line of it is met by some config, and by no config without the trait."""

from __future__ import annotations

import pytest

from unipar.backend.refusals import REFUSALS, SCRIPT, Trait, keys_in_use, refuse_optimizers
from unipar.config import Config
from unipar.config.sections.optimizer import OPTIMIZERS


def config_with(optimizer: str) -> Config:
    """Return a config in which every key is set that some optimizer refuses."""
    train = {"steps": 8, "optimizer": {"name": optimizer}, "precision": "fp64", "local_steps": 2}
    parallel = {"data": 1, "tensor": 2, "shard": "parameters"}
    sections = {"batch": {"total": 8, "micro": 2}, "parallel": parallel, "model": {"offload": "parameters"}}
    return Config.model_validate({**sections, "train": train})


@pytest.mark.parametrize(("trait", "carrier"), [(trait, carrier) for trait, row in REFUSALS.items() for carrier in row])
def test_each_refusal_is_met_by_the_optimizers_that_have_its_trait(trait: Trait, carrier: str) -> None:
    """A trait or a key that does not exist would never be met."""
    met: set[str] = set()
    for name in OPTIMIZERS:
        config = config_with(name)
        carriers = {**keys_in_use(config), SCRIPT: True}
        sentences = list(refuse_optimizers(config, carriers, {trait: {carrier: REFUSALS[trait][carrier]}}))
        assert [s for s in sentences if not s.startswith(f"train.optimizer.name: {name} ") or "{" in s] == []
        met |= {name} if sentences else set()
    assert met == {name for name, kind in OPTIMIZERS.items() if getattr(kind, trait)} != set()
