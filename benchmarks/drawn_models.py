"""Small models of transformers, drawn by a seed: kind, size, head, frozen parts, and what the loss is taken from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar

WORDS, LENGTH, SAMPLES = 67, 12, 64

Sizes = Callable[[int, int, int], Mapping[str, Any]]
"""Function that returns a config's values for a width, a number of layers and a number of heads."""


def _usual(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, "max_position_embeddings": 2 * LENGTH}


def _grouped(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    return {**_usual(width, layers, heads), "num_key_value_heads": heads // 2, "head_dim": width // heads}


def _gpt2(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": LENGTH}


def _opt(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    return {**_usual(width, layers, heads), "ffn_dim": 2 * width, "word_embed_proj_dim": width}


def _electra(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    return {**_usual(width, layers, heads), "embedding_size": width // 2}


def _distilbert(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    return {"dim": width, "hidden_dim": 2 * width, "n_layers": layers, "n_heads": heads}


def _t5(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 2 * width, "num_layers": layers, "num_heads": heads}
    return sizes | {"num_decoder_layers": layers, "decoder_start_token_id": 0}


def _bart(width: int, layers: int, heads: int) -> Mapping[str, Any]:
    sizes: dict[str, Any] = {"d_model": width, "max_position_embeddings": 2 * LENGTH, "decoder_start_token_id": 0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_ffn_dim": 2 * width, f"{side}_attention_heads": heads}
    return sizes


@dataclass(frozen=True)
class Family:
    """Model of transformers: the beginning of its classes' names, its class with a head, and how sizes are given."""

    name: str
    headed: str
    sizes: Sizes = _usual


FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "encoder": (
        Family("Bert", "BertForMaskedLM"),
        Family("Roberta", "RobertaForMaskedLM"),
        Family("DistilBert", "DistilBertForMaskedLM", _distilbert),
        Family("Electra", "ElectraForMaskedLM", _electra),
    ),
    "decoder": (
        Family("GPT2", "GPT2LMHeadModel", _gpt2),
        Family("Llama", "LlamaForCausalLM", _grouped),
        Family("Qwen2", "Qwen2ForCausalLM", _grouped),
        Family("Gemma", "GemmaForCausalLM", _grouped),
        Family("GPTNeoX", "GPTNeoXForCausalLM"),
        Family("OPT", "OPTForCausalLM", _opt),
    ),
    "encoder-decoder": (
        Family("T5", "T5ForConditionalGeneration", _t5),
        Family("Bart", "BartForConditionalGeneration", _bart),
    ),
}
"""Families by kind."""

HEADS = ("tied", "untied", "unused", "none")
"""Heads: with the embedding's weight, with one of its own, one that the loss does not use, or none."""

FROZEN = ("nothing", "embeddings", "lower half", "all but norms and biases", "all but the last block", "by chance")
"""Parts that are frozen."""

AVERAGES = ("first token", "all tokens")
"""What the loss is taken from if no head is used: a mean over numbers that a last norm makes has almost no gradient."""


@dataclass(frozen=True)
class Draw:
    """Choices drawn for one model."""

    kind: str
    family: Family
    layers: int
    width: int
    heads: int
    head: str
    frozen: str
    average: str
    single: tuple[int, ...] | None
    """Shape of one more parameter, of a single element, by which the loss is multiplied."""

    dropout: float
    optimizer: str
    clip: float | None

    @classmethod
    def of(cls, seed: int, number: int) -> Draw:
        """Return the draw of this number of a seed."""
        chance = Random(f"{seed} {number}")
        kind = list(FAMILIES)[number % len(FAMILIES)]  # each kind as often as the others
        heads = chance.choice((2, 4))
        return cls(
            kind,
            chance.choice(FAMILIES[kind]),
            chance.randint(1, 4),
            heads * chance.choice((8, 12)),
            heads,
            chance.choice(HEADS),
            chance.choice(FROZEN),
            chance.choice(AVERAGES),
            chance.choice((None, None, (1,), ())),
            chance.choice((0.0, 0.0, 0.0, 0.1)),
            chance.choice(("adamw", "adamw", "adamw", "sgd")),
            chance.choice((None, 0.1, 1.0)),
        )

    @override
    def __str__(self) -> str:
        of = {"tied": "tied head", "untied": "head of its own"}.get(self.head, f"mean of {self.average}")
        parts = [
            f"{self.family.name} {self.layers} x {self.width}",
            of,
            *(["unused head"] if self.head == "unused" else []),
            *([] if self.frozen == "nothing" else [f"frozen: {self.frozen}"]),
            *([] if self.single is None else [f"a parameter of shape {self.single}"]),
            *([] if not self.dropout else ["dropout"]),
            f"{self.optimizer}, clip {self.clip}",
        ]
        return "; ".join(parts)

    @property
    def module(self) -> str:
        """Name of the module that has the model's classes."""
        name = {"GPTNeoX": "gpt_neox"}.get(self.family.name, self.family.name.lower())
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the training that were drawn."""
        rates = {"adamw": {"name": "adamw", "lr": 1e-3}, "sgd": {"name": "sgd", "lr": 1e-2, "momentum": 0.9}}
        return {"train.optimizer": rates[self.optimizer], "train.clip": self.clip}


class Scaled(nn.Module):
    """Model with one more parameter."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.scale = model, nn.Parameter(torch.ones(shape))

    @override
    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


@final
class Drawn(unipar.Task):
    """Task that trains the model of this number of a seed."""

    def __init__(self, seed: int, number: int) -> None:
        self.draw = Draw.of(seed, number)

    @override
    def model(self) -> nn.Module:
        draw, transformers = self.draw, import_module("transformers")
        config: Any = getattr(transformers, f"{draw.family.name}Config")(
            vocab_size=WORDS,
            tie_word_embeddings=draw.head != "untied",
            use_cache=False,
            pad_token_id=0,
            **draw.family.sizes(draw.width, draw.layers, draw.heads),
        )
        for name in [key for key in config.to_dict() if "dropout" in key or key.endswith("_pdrop")]:
            if isinstance(getattr(config, name), float):
                setattr(config, name, draw.dropout)
        made: nn.Module = getattr(
            transformers, f"{draw.family.name}Model" if draw.head == "none" else draw.family.headed
        )(config)
        freeze(made, draw, Random(f"{draw}"))
        return made if draw.single is None else Scaled(made, draw.single)

    @override
    def blocks(self, model: nn.Module) -> list[str]:
        """Return the blocks by name, because a model with one of them does not show that it is repeated."""
        return [name for name, _ in model.named_modules() if re.search(r"(^|\.)(layers?|h|block)\.\d+$", name)]

    @override
    def cuts(self, stages: int) -> list[str] | None:
        """Return the first block of a decoder: the encoder's output cannot cross another cut."""
        if self.draw.kind != "encoder-decoder":
            return None
        return [name for name in self.blocks(self.model()) if re.search(r"decoder\.(layers|block)\.0$", name)]

    @override
    def data(self) -> Any:
        g = Generator().manual_seed(0)
        words = torch.randint(1, WORDS - 1, (SAMPLES, LENGTH), generator=g)
        return TensorDataset(words, torch.randn(SAMPLES, generator=g))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        words, wanted = batch
        draw = self.draw
        inner: Any = model if draw.single is None else model.inner
        times = 1.0 if draw.single is None else model.scale.sum()
        given = {"input_ids": words}
        if draw.kind == "encoder-decoder":
            given["decoder_input_ids"] = words.flip(1)
        if draw.head in ("tied", "untied"):
            logits = inner(**given).logits
            return times * F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        hidden = (inner if draw.head == "none" else inner.base_model)(**given)[0]
        mean = hidden[:, 0].mean(-1) if draw.average == "first token" else hidden.mean((1, 2))
        return times * F.mse_loss(mean, wanted)


def freeze(model: nn.Module, draw: Draw, chance: Random) -> None:
    """Freeze the parts of a model that were drawn."""
    for name, p in model.named_parameters():
        block = re.search(r"\.(\d+)\.", name)
        number = int(block[1]) if block is not None else -1
        frozen = {
            "nothing": False,
            "embeddings": "emb" in name or "wte" in name or "wpe" in name or "shared" in name,
            "lower half": number < draw.layers // 2 and "head" not in name and "norm" not in name,
            "all but norms and biases": p.ndim > 1,
            "all but the last block": number < draw.layers - 1,
            "by chance": chance.random() < 0.5,
        }[draw.frozen]
        p.requires_grad_(not frozen)
