"""Configs beside exported weights: whose they are, and what is said if there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from unipar.checkpoint.exporting.config_files import write_library_config
from unipar.model.library_configs import library_configs


class Around(nn.Module):
    """Module of the user's around a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=5, n_positions=4))
        self.config = {"own": 1}


def written(folder: Path, state: Any, to: str = "hf", rename: Any = (), dtype: str | None = None) -> str:
    return write_library_config(state, folder, to, "default", rename, dtype)


def test_the_config_of_a_model_inside_another(tmp_path: Path) -> None:
    """Its names are taken out with --rename, and then its config is written, with the dtype of the tensors."""
    configs = json.loads(json.dumps(library_configs(Around())))
    assert [(one["file"], one["under"], one["content"]["architectures"]) for one in configs] == [
        ("config.json", "net", ["GPT2LMHeadModel"])
    ]
    state = {"parts": {"model": {"configs": configs}}}
    assert written(tmp_path, state) == (
        "no config.json: the checkpoint has none, for the task's model is no model of transformers; one is under net: "
        "--rename net.="
    )
    assert not list(tmp_path.iterdir())
    assert written(tmp_path, state, rename=[("net.", "")], dtype="bf16") == "with config.json"
    loaded: Any = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.model_type, loaded.n_embd, str(loaded.dtype)) == ("gpt2", 8, "torch.bfloat16")
    several = {"parts": {"one": {"configs": configs}, "other": {"configs": []}}}
    assert written(tmp_path, several, rename=[("one.net.", "")]) == "with config.json"


@pytest.mark.parametrize(
    ("state", "to", "sentence"),
    [
        ({}, "safetensors", ""),
        ({"parts": {"model": {}}}, "hf",
         "no config.json: the checkpoint has none, for the task's model is no model of transformers"),
        ({"parts": {"model": {"configs": []}}}, "peft",
         "no adapter_config.json: the checkpoint has none, for the task's model is no model of peft with an adapter "
         "'default'"),
    ],
)  # fmt: skip
def test_why_there_is_none(tmp_path: Path, state: Any, to: str, sentence: str) -> None:
    """A checkpoint of a plain model, or of an earlier version, has no config."""
    assert written(tmp_path, state, to) == sentence


def test_a_config_that_cannot_be_written(tmp_path: Path) -> None:
    """The library's own error is kept in the checkpoint, and told."""

    class Broken(GPT2Config):
        def to_json_string(self, *args: Any, **more: Any) -> str:  # pyright: ignore[reportImplicitOverride]
            raise TypeError("not JSON")

    net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=5, n_positions=4))
    net.config = Broken(n_layer=1, n_head=1, n_embd=8)
    state = {"parts": {"model": {"configs": library_configs(net)}}}
    assert written(tmp_path, state) == (
        "no config.json: the model's own config could not be written (TypeError: not JSON)"
    )
