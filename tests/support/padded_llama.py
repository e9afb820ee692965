"""Tasks for Accelerate's mesh: a Llama whose samples end at several places, and one that writes down its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from examples.char_gpt import CharGPT

WORDS, LENGTH = 31, 12


class PaddedLlama(unipar.Task):
    """Next-word prediction; positions behind a sample's end are masked in attention and in the loss."""

    @override
    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "use_cache": False}
        heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads))

    @override
    def data(self) -> Any:
        words = torch.randint(0, WORDS, (64, LENGTH), generator=Generator().manual_seed(0))
        first = torch.arange(64).remainder(5)  # padding in front: later positions would see it without a mask
        return TensorDataset(words, (torch.arange(LENGTH) >= first.unsqueeze(1)).long())

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        words, shown = batch
        logits = model(input_ids=words, attention_mask=shown).logits[:, -5:-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, -4:].flatten())


class Seen(CharGPT):
    """The character GPT; rank 0 writes down, in an evaluation, what Accelerate has made of it."""

    def __init__(self, out: str, **args: Any) -> None:
        super().__init__(**args)
        self.out = out

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        from accelerate.state import AcceleratorState

        path = Path(self.out)
        if AcceleratorState._shared_state and not path.exists() and torch.distributed.get_rank() == 0:  # pyright: ignore[reportPrivateUsage]
            state: Any = AcceleratorState()
            sizes, mesh = state.parallelism_config, state.device_mesh
            block = model.layers[0]
            kinds = type(block).__name__.startswith("FSDP")
            shape = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            four = [sizes.dp_replicate_size, sizes.dp_shard_size, sizes.cp_size, sizes.tp_size]
            path.write_text(repr((four, shape, kinds, block.qkv.weight.shape[0])), encoding="utf-8")
        return super().loss(model, batch)
