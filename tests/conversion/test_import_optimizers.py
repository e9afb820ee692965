"""`unipar import` of RMSprop and of AdamW with states of 8 bits, and `unipar export` of RMSprop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import FORGETS, HIDES, WORDS
from tests.support.forks import Forks
from tests.support.imports import STEPS, ds, optimizer, recipe
from tests.support.traveller import Words20
from unipar import join
from unipar.config import config_source as source
from unipar.conversion.export import export_script
from unipar.conversion.import_config import import_library_config
from unipar.errors import ConfigError

RECIPE = {"per_device_train_batch_size": 1, "learning_rate": 5e-7, "weight_decay": 0.01, "max_steps": 10}


def of_deepspeed(folder: Path, params: dict[str, Any]) -> dict[str, Any]:
    config = {"train_batch_size": 32, "optimizer": {"type": "RMSprop", "params": params}}
    return optimizer(ds(folder, config, STEPS))


def test_rmsprop_of_a_ds_config(tmp_path: Path) -> None:
    """DeepSpeed hands it to PyTorch as it is, with PyTorch's defaults."""
    plain = {"lr": 0.01, "weight_decay": 0.0, "alpha": 0.99, "momentum": 0.0, "centered": False, "eps": 1e-8}
    assert of_deepspeed(tmp_path, {}) == {"name": "rmsprop"} | plain
    own = {"lr": 0.1, "weight_decay": 0.2, "alpha": 0.9, "momentum": 0.5, "centered": True, "eps": 1e-4}
    assert of_deepspeed(tmp_path, own | {"foreach": True}) == {"name": "rmsprop", "foreach": True} | own
    with pytest.raises(ConfigError, match=r"optimizer\.params\.betas: there is no such key"):
        of_deepspeed(tmp_path, {"betas": [0.9, 0.99]})


def test_rmsprop_of_a_trainer(tmp_path: Path) -> None:
    """Rate and decay are the Trainer's, and adam_epsilon is not read; `optim_args` hold its own settings."""
    plain = {"name": "rmsprop", "lr": 5e-7, "weight_decay": 0.01, "decay": "transformers"}
    assert optimizer(recipe(tmp_path, RECIPE, optim="rmsprop", adam_epsilon=1e-3)) == plain
    own = "alpha=0.9, centered=True,momentum=0.5,eps=1e-6,weight_decay=0.1"
    made = recipe(tmp_path, RECIPE, optim="rmsprop", optim_args=own)
    assert optimizer(made) == plain | {"alpha": 0.9, "centered": True, "momentum": 0.5, "eps": 1e-6}
    why = "weight_decay has no effect, as the Trainer gives each group its own argument of that name"
    assert f"optim_args: {why}" in made.left_out


@pytest.mark.parametrize(
    ("optim", "optim_args", "sentence"),
    [
        (
            "rmsprop",
            "rho=0.9",
            "optim_args (line 1): rho=0.9 is not carried for rmsprop; leave it out with --l",
        ),
        ("rmsprop", "alpha=high", "optim_args (line 1): alpha=high is not carried for rmsprop"),
        ("adamw_torch", "alpha=0.9", "optim_args (line 1): alpha=0.9 is not carried for adamw_torch"),
        ("lion", None, "optim (line 1): lion is neither sgd nor rmsprop nor a kind of adamw, such as adamw_torch and"),
    ],
)
def test_what_is_not_carried(optim: str, optim_args: str | None, sentence: str, tmp_path: Path) -> None:
    """Settings that RMSprop has not, those of other optimizers, and optimizers that unipar has not."""
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, RECIPE, optim=optim, optim_args=optim_args)
    assert sentence in str(caught.value)


OF_TORCHAO = "by torchao too, with blocks that are the same in every world: in 8 bits are weights whose rows are"
OF_BITSANDBYTES = (
    "with torchao's codes, not bitsandbytes'; in 8 bits are weights whose rows are blocks of 256, embeddings"
)
FLAT = "ZeRO joins parameters in flat tensors, where blocks of moments would reach from one parameter into the next"


@pytest.mark.parametrize(
    ("optim", "keys", "name", "remark"),
    [
        ("adamw_torch_8bit", {}, "adamw-8bit", f"adamw-8bit, {OF_TORCHAO} blocks of 256"),
        ("adamw_bnb_8bit", {"fsdp": "full_shard"}, "adamw-8bit", f"adamw-8bit, {OF_BITSANDBYTES}"),
        ("paged_adamw_8bit", {}, "adamw-8bit", f"adamw-8bit, {OF_BITSANDBYTES}"),
        ("adamw_8bit", {"deepspeed": "zero2"}, "adamw", f"AdamW with states in fp32, not in 8 bits: {FLAT}"),
        (
            "adamw_torch_8bit",
            {"tensor_parallel_size": 2},
            "adamw",
            "AdamW with states in fp32, not in 8 bits: with p",
        ),
        (
            "adamw_bnb_8bit",
            {"fsdp": "full_shard offload"},
            "adamw",
            "AdamW with states in fp32, not in 8 bits: with m",
        ),
        ("adamw_torch_4bit", {}, "adamw", "AdamW with states in fp32, not in fewer bits"),
    ],
)
def test_states_of_8_bits(optim: str, keys: dict[str, Any], name: str, remark: str, tmp_path: Path) -> None:
    """They are unipar's where the strategy can hold them, and fp32 where not; what differs is told."""
    made = recipe(tmp_path, RECIPE, optim=optim, **keys)
    assert optimizer(made)["name"] == made.config.train.optimizer.name == name
    (told,) = (note for note in made.assumed if note.startswith("train.optimizer.name: "))
    assert told.startswith(f"train.optimizer.name: {optim}: {remark}")


def test_an_optimizer_that_is_said_elsewhere(tmp_path: Path) -> None:
    """--set wins over the arguments, and so does a ds_config.json that has an optimizer; neither gets 8 bits."""
    made = recipe(tmp_path, RECIPE, "train.optimizer.name=adamw", optim="adamw_torch_8bit")
    assert optimizer(made)["name"] == "adamw"
    mics = {"stage": 3, "mics_shard_size": 2}
    adamw = {"type": "AdamW", "params": {"lr": 5e-7}}
    (tmp_path / "mics.json").write_text(json.dumps({"zero_optimization": mics, "optimizer": adamw}), encoding="utf-8")
    of_file = recipe(tmp_path, RECIPE, optim="adamw_torch_8bit", deepspeed="mics.json", weight_decay=0.0)
    assert (of_file.config.backend, optimizer(of_file)["name"]) == ("native", "adamw")
    assert [note for note in (*made.assumed, *of_file.assumed) if "8bit" in note] == []
    kept = recipe(tmp_path, RECIPE, "train.optimizer.fused=true", optim="adamw_torch_8bit")
    assert optimizer(kept)["name"] == "adamw"
    assert any(
        "not in 8 bits: the config: train.optimizer.fused: there is no such key" in note for note in kept.assumed
    )


RMSPROP = {"name": "rmsprop", "lr": 0.01, "alpha": 0.9, "eps": 1e-4, "momentum": 0.5, "centered": True}


def test_there_and_back(tmp_path: Path) -> None:
    """The ds_config.json of an exported script means the same when it is imported."""
    told = {**WORDS, "backend": "deepspeed", "train": {**WORDS["train"], "optimizer": RMSPROP, "lr_scale": {}}}
    before = source.load_given_config({**told, "parallel": {"data": 2, "shard": "gradients"}})
    folder = export_script(before, "deepspeed", tmp_path / "made").folder
    after = import_library_config(folder / "ds_config.json", ["train.steps=5", "device=cpu"]).config
    assert after.train.optimizer == before.config.train.optimizer


@pytest.mark.parametrize(("to", "shard"), [("deepspeed", "gradients"), ("torchrun", "parameters")])
def test_the_same_losses(to: str, shard: str, tmp_path: Path, forks: Forks) -> None:
    """Scripts with RMSprop have the losses of one process without any library; unipar cannot be imported there."""
    told: dict[str, Any] = {**WORDS, "train": {**WORDS["train"], "optimizer": RMSPROP}}
    alone = {"backend": "single", "parallel": {"data": 1}, "out": str(tmp_path / "alone")}
    with join(told, task=Words20, overrides=alone, overwrite=True) as run:
        expected = [run.step(local_batch).loss for local_batch in run.batches()]
    given = source.load_given_config({**told, "parallel": {"data": 2, "shard": shard}})
    made = export_script(given, to, tmp_path / "made")
    (tmp_path / "start.py").write_text(HIDES + FORGETS, encoding="utf-8")
    for done in forks.ranks([str(tmp_path / "start.py")], made.folder, {"DS_ACCELERATOR": "cpu"}):
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (made.folder / "log.jsonl").read_text("utf-8").splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=2e-6)
