"""Llama of transformers from its sizes: `unipar plan configs/llama_7b.yaml --world 8,64 --machine h100-sxm`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unipar


class Llama(unipar.Task):
    def __init__(
        self,
        hidden: int = 64,
        inner: int = 172,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        vocabulary: int = 32_000,
        context: int = 64,
    ) -> None:
        self.context = context
        self.sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": context,
            "use_cache": False,
        }

    @cached_property
    def tokens(self) -> Tensor:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[:4_000_000]), dtype=torch.uint8)

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**self.sizes))

    def data(self) -> TensorDataset:
        return TensorDataset(self.tokens[: len(self.tokens) // self.context * self.context].view(-1, self.context))

    def weight(self, batch: tuple[Tensor]) -> float:
        return float(batch[0][:, 1:].numel())  # the first token is not predicted

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        tokens = batch[0].long()
        return model(input_ids=tokens, labels=tokens).loss
