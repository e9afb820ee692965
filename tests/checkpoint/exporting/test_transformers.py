"""Models and adapters trained by unipar, exported, and loaded by transformers and peft themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from typing_extensions import override

from tests.support.checkpoints import save_on_ranks
from tests.support.forks import Forks
from tests.support.lora_task import lora_model
from tests.support.transformer_models import LENGTH, WORDS, Gpt2
from tests.support.world import ROOT
from unipar.backend import Region
from unipar.checkpoint.exporting.writing import ExportWish, export_checkpoint
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave
from unipar.checkpoint.protocol.verifying import CheckpointContents, inspect_checkpoint, verify_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.checkpoint.storage.disk import Disk
from unipar.checkpoint.tensor_bytes import bytes_of
from unipar.model.state_names import state_names

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

STRATEGIES = ["native/parameters", "deepspeed/parameters"]
STEPS = 3


def trained(forks: Forks, folder: Path, task: str, strategy: str) -> CheckpointContents:
    """Return the last checkpoint of a run of 2 ranks."""
    config = {
        "task": {"use": str(ROOT / "tests/support" / task)},
        "backend": strategy.partition("/")[0],
        "parallel": {"data": 2, "shard": strategy.partition("/")[2]},
        "device": "cpu",
        "batch": {"total": 4},
        "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 0.05}},
        "checkpoint": {"every": None},
        "out": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(json.dumps(config), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = forks.unipar(["run", str(folder / "config.yaml")], {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return verify_checkpoint(folder / "run/checkpoints" / f"step-{STEPS:08d}")


class Small(nn.Module):
    """Two layers, one of which has the name of peft's first adapter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.default, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.default(self.first(x)))


def saved(folder: Path, model: nn.Module) -> CheckpointContents:
    """Return a checkpoint of a model's parameters, as a run on one rank saves them."""

    def pieces(rank: int, step: int) -> Sequence[PieceToSave]:
        return [
            PieceToSave(name, "weight", "F32", tuple(p.shape), Region(0, p.numel()), bytes(bytes_of(p.detach())))
            for name, p in model.named_parameters()
        ]

    state = {"parts": {"model": state_names(model)._asdict()}}
    (done,) = save_on_ranks(folder, 1, disks=[Disk()], pieces=pieces, state=state)
    assert not isinstance(done, BaseException), done
    return inspect_checkpoint(done.path)


@pytest.mark.parametrize("bias", ["all", "lora_only", "none"])
def test_biases_and_a_module_with_the_adapters_name(tmp_path: Path, bias: Any) -> None:
    """The file has the names and biases of peft's own; a layer that is trained besides is named, and peft loads it."""
    torch.manual_seed(1)
    base = Small()
    made: Any = get_peft_model(deepcopy(base), LoraConfig(r=2, target_modules=["default", "first"], bias=bias))
    made.base_model.model.head.weight.requires_grad_(True)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.requires_grad and "head.weight" not in name:
                p.add_(torch.rand_like(p))
    done = export_checkpoint(saved(tmp_path / "saved", made), tmp_path / "adapter", ExportWish(to="peft"))
    made.save_pretrained(tmp_path / "by_peft")
    ours = load_file(tmp_path / "adapter/adapter_model.safetensors")
    theirs = load_file(tmp_path / "by_peft/adapter_model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert len([name for name in ours if name.endswith(".bias")]) == {"all": 3, "lora_only": 2, "none": 0}[bias]
    assert done.left_out == (
        "left out, although trained, since they are not the adapter's: base_model.model.head.weight; to have them too: "
        "--to safetensors --trainable"
    )
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    x = torch.rand(5, 3)
    assert torch.equal(loaded(x), made(x))


def logits(model: Any) -> Tensor:
    words = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    with torch.no_grad():
        return model.eval()(input_ids=words).logits


def with_values_of(model: Any, contents: CheckpointContents) -> Any:
    """Return the model with the saved weights, filled by their plain names without any export."""
    with SavedState(contents.path, contents.manifest) as state, torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state.whole(name, "weight"))
    return model


@pytest.mark.parametrize("strategy", [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.sweep)])
def test_transformers_loads_an_exported_model(forks: Forks, tmp_path: Path, strategy: str) -> None:
    """Several files with an index, tied embeddings under one name: the same logits, no key missing or unexpected."""
    contents = trained(forks, tmp_path, "transformer_models.py:Gpt2", strategy)
    done = export_checkpoint(contents, tmp_path / "hf", ExportWish(to="hf", size="20KB"))
    assert done.config == "with config.json"
    assert len(list((tmp_path / "hf").iterdir())) > 2
    model: Any = Gpt2().model()
    before = logits(model)
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    loaded, said = both
    assert type(loaded) is GPT2LMHeadModel
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    after = logits(with_values_of(model, contents))
    assert torch.equal(logits(loaded), after)
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("strategy", [pytest.param(STRATEGIES[0], marks=pytest.mark.sweep), STRATEGIES[1]])
def test_peft_loads_an_exported_adapter(forks: Forks, tmp_path: Path, strategy: str) -> None:
    """Only what was trained, under the names that peft expects; the same logits over a base model of its own."""
    contents = trained(forks, tmp_path, "lora_task.py:Lora", strategy)
    made = lora_model()
    before = logits(made)
    done = export_checkpoint(contents, tmp_path / "adapter", ExportWish(to="peft"))
    assert done.config == "with adapter_config.json"
    file = tmp_path / "adapter/adapter_model.safetensors"
    made.save_pretrained(tmp_path / "saved_by_peft")
    assert set(load_file(file)) == set(load_file(tmp_path / "saved_by_peft/adapter_model.safetensors"))
    folders = (tmp_path / "adapter", tmp_path / "saved_by_peft")
    ours, theirs = (json.loads((folder / "adapter_config.json").read_text("utf-8")) for folder in folders)
    assert ours == theirs
    torch.manual_seed(3)
    base: Any = Gpt2().model()
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    after = logits(with_values_of(made, contents))
    assert torch.equal(logits(loaded), after)
    assert not torch.allclose(before, after)
