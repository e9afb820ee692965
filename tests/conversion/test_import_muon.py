"""`unipar import` of Muon, as DeepSpeed and LLaMA-Factory name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.imports import STEPS, ds, optimizer, recipe
from unipar.errors import ConfigError

RECIPE = {"per_device_train_batch_size": 1, "learning_rate": 1e-5, "weight_decay": 0.01, "max_steps": 10}
OF_MATRICES = "all but those of embeddings and of the last module, not all without embed or lm_head in their name"


def test_a_ds_config(tmp_path: Path) -> None:
    """Both rates, the factor of the rate and Adam's settings; what is assumed of the matrices is told."""
    params = {"lr": 1e-3, "muon_lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "betas": [0.8, 0.95], "eps": 1e-9}
    zero = {"stage": 3, "save_muon_momentum_buffer_in_memory": True}
    muon = {"type": "Muon", "params": params | {"ns_method": "standard"}}
    config: dict[str, Any] = {"train_batch_size": 32, "optimizer": muon, "zero_optimization": zero}
    made = ds(tmp_path, config, STEPS, strict=False)
    assert optimizer(made) == {
        "name": "muon",
        "adjust_lr": "original",
        "lr": 0.05,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "adamw": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-9},
        "ns_precision": "bf16",
        "matrices": "auto",
    }
    assert made.assumed[0] == "train.optimizer.matrices: 'auto'"
    assert OF_MATRICES in made.text


def test_the_least_of_a_ds_config(tmp_path: Path) -> None:
    """DeepSpeed's own defaults, which differ from unipar's; a rate of the scheduler is that of both."""
    made = ds(tmp_path, {"train_batch_size": 32, "optimizer": {"type": "Muon"}}, STEPS, strict=False)
    assert optimizer(made) == {
        "name": "muon",
        "adjust_lr": "original",
        "lr": 0.02,
        "weight_decay": 0.0,
        "momentum": 0.95,
        "adamw": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-10},
        "ns_precision": "full",
        "matrices": "auto",
    }
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_type": "linear", "warmup_num_steps": 9}}
    config = {"train_batch_size": 32, "optimizer": {"type": "Muon"}, "scheduler": scheduler}
    of_both = optimizer(ds(tmp_path, config, STEPS, strict=False))
    assert (of_both["lr"], of_both["adamw"]["lr"]) == (0.01, 0.01)


@pytest.mark.parametrize(
    ("params", "strict", "sentence"),
    [
        ({"per_head_muon": True}, False, "optimizer.params.per_head_muon: unipar's Muon takes each matrix as"),
        ({"nesterov": False}, False, "optimizer.params.nesterov: there is no such key"),
        ({}, True, "optimizer.params.ns_method: gram runs in fp16; choose a value with --set train.optimizer.ns_prec"),
        ({}, True, f"optimizer.type: Muon's matrices go by name there; auto: {OF_MATRICES}; choose a value w"),
    ],
)
def test_what_a_ds_config_may_not_say(params: dict[str, Any], strict: bool, sentence: str, tmp_path: Path) -> None:
    """Attention heads apart, keys that DeepSpeed's Muon has not, and under --strict what is assumed."""
    with pytest.raises(ConfigError) as caught:
        ds(tmp_path, {"train_batch_size": 32, "optimizer": {"type": "Muon", "params": params}}, STEPS, strict=strict)
    assert sentence in str(caught.value)


def test_use_muon(tmp_path: Path) -> None:
    """LLaMA-Factory's: rate, decay and Adam's settings are the Trainer's."""
    made = recipe(tmp_path, RECIPE, use_muon=True, adam_beta2=0.95)
    assert optimizer(made) == {
        "lr": 1e-5,
        "weight_decay": 0.01,
        "name": "muon",
        "ns_precision": "bf16",
        "adamw": {"betas": [0.9, 0.95], "eps": 1e-8},
    }
    assert f"train.optimizer.matrices: auto: {OF_MATRICES}" in made.assumed
    with pytest.raises(
        ConfigError, match=r"use_muon \(line 1\): auto: all but those of embeddings and of the last mod"
    ):
        recipe(tmp_path, RECIPE, use_muon=True, strict=True)


def test_optim_config(tmp_path: Path) -> None:
    """Its own rate and decay win, also by their defaults, which is told; the Trainer's are not read."""
    made = recipe(tmp_path, RECIPE, optim_config={"name": "muon", "ns_steps": 6, "adamw_betas": [0.9, 0.9], "wd": 0.2})
    assert optimizer(made) == {
        "lr": 1e-3,
        "weight_decay": 0.2,
        "name": "muon",
        "ns_precision": "bf16",
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 6,
        "adamw": {"betas": [0.9, 0.9], "eps": 1e-8},
    }
    assert "learning_rate: the rate of Muon is that in optim_config, 0.001 by default" in made.left_out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optim_config": {"name": "muon", "warmth": 3}}, "optim_config (line 1): warmth: 3 has no key of unipar for"),
        ({"optim_config": {"name": "lion"}}, 'optim_config (line 1): {"name": "lion"} has no key of unipar; leave it'),
        ({"optim": "muon"}, "optim (line 1): axolotl's Muon has Newton-Schulz coefficients and a factor of the rate"),
    ],
)  # fmt: skip
def test_what_is_not_carried(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Others' settings and formulas, each with the way out."""
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, RECIPE, **change)
    assert sentence in str(caught.value)
