"""Tasks whose tensor and context parallelism is exported: models of transformers, and blocks that a script refuses."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

import unipar

WORDS, LENGTH, WIDTH, HEADS = 61, 16, 32, 4


def made(name: str, config: str, **sizes: Any) -> Any:
    """Return a model of transformers by the names of its class and config."""
    transformers: Any = import_module("transformers")
    return getattr(transformers, name)(getattr(transformers, config)(vocab_size=WORDS, **sizes))


class Texts(unipar.Task):
    """28 texts of 9 to 16 words: batches of 8 leave 4 over; the first microbatches have as many words as others."""

    @override
    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return [torch.randint(1, WORDS, (9 + i % 8,), generator=g) for i in range(28)]

    @override
    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        longest = max(len(s) for s in samples)
        words = torch.stack([F.pad(s, (0, longest - len(s))) for s in samples])
        return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": words.masked_fill(words == 0, -100)}

    @override
    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"][:, 1:].ne(-100).sum()

    @override
    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss


class GPT2(Texts):
    """GPT-2: transposed matrices, a fused projection that is split by an attribute, dropout everywhere."""

    @override
    def model(self) -> nn.Module:
        sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return made("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes, **ends)


class Llama(Texts):
    """Llama: grouped queries, rotary tables as a tuple by name."""

    @override
    def model(self) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2}
        return made("LlamaForCausalLM", "LlamaConfig", use_cache=False, **sizes, **heads)


class Bert(Texts):
    """BERT: attention in both directions."""

    @override
    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"].ne(-100).sum()

    @override
    def model(self) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
        heads = {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
        return made("BertForMaskedLM", "BertConfig", **sizes, **heads)
