"""Tasks whose tensor and context parallelism is exported: models of transformers, and blocks that a script refuses."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

import unipar

WORDS, LENGTH, WIDTH, HEADS = 62, 16, 32, 4


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


class WholeAttention(GPT2):
    """The same, whose attention, with dropout of its own, stays whole."""

    @override
    def tensor(self, model: nn.Module) -> dict[str, str]:
        return {"*.attn.c_attn": "whole", "*.attn.c_proj": "whole"}


class CachedGPT2(Texts):
    """GPT-2 as its config makes it: keys are put behind an empty cache in each forward."""

    @override
    def model(self) -> nn.Module:
        sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return made("GPT2LMHeadModel", "GPT2Config", bos_token_id=0, eos_token_id=0, **sizes, **drops)


class SharedKeys(Texts):
    """Llama whose heads of queries share those of keys, and whose batches come with a mask and without."""

    def __init__(self, heads: int = 2, keys: int = 1) -> None:
        self.heads = {"num_attention_heads": heads, "num_key_value_heads": keys}

    @override
    def model(self) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "use_cache": False}
        return made("LlamaForCausalLM", "LlamaConfig", **self.heads, **sizes)

    @override
    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        masked = bool(batch["input_ids"][0, 0] % 2)
        return super().loss(model, batch if masked else {k: v for k, v in batch.items() if k != "attention_mask"})


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


class Layer(nn.Module):
    """Attention and two layers, in one of several kinds; most of them ask for what a script does not carry."""

    slopes: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads, self.width = kind, HEADS, WIDTH
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Dropout(0.1 * (kind == "dropped"))
        self.up, self.drop, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Dropout(0.2 * (kind != "dry")),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.register_buffer("slopes", torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))
        if kind == "multihead":
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def attend(self, x: Tensor, given: Tensor) -> Tensor:
        b, t, _ = (given if self.kind == "top" else x).shape
        heads = 4 if self.kind == "literal" else self.heads
        q, k, v = (y.view(b, t, heads, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scale = self.width**-0.5 if self.kind == "scale" else None
        if self.kind == "eager":
            seen = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        elif self.kind == "slopes":
            seen = F.scaled_dot_product_attention(q, k, v, self.slopes * self.slopes.new_ones(t).cumsum(0))
        else:
            seen = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(b, t, self.width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.kind == "multihead":
            x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        else:
            x = x + self.attend(normed, x)
        hidden = self.up(x)
        hidden = F.dropout(hidden, 0.1, self.training) if self.kind == "functional" else self.drop(hidden.relu())
        out = self.leave(self.down(hidden)) * (x.shape[1] if self.kind == "longer" else 1)
        return x + (F.dropout(out, 0.1, self.training) if self.kind == "functional parts" else out)


class ScaledWords(nn.Embedding):
    """Embedding whose rows are multiplied."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class Layers(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.between = kind == "between"
        self.reused = kind == "reused"
        words = ScaledWords if kind == "scaled" else nn.Embedding
        self.words, self.head = words(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))

    @override
    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(F.dropout(x, 0.1, self.training) if self.between else x)
        return self.head(x) + F.linear(x, self.words.weight) if self.reused else self.head(x)


class Kinds(Texts):
    """A model of such layers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @override
    def model(self) -> nn.Module:
        return Layers(self.kind)

    @override
    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["input_ids"])[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


class KeptWhole(Kinds):
    """The same, of which the task keeps attention whole."""

    @override
    def tensor(self, model: nn.Module) -> dict[str, str]:
        return {"*.attention": "whole"}
