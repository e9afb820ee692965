"""Tasks that train small models of transformers, made from their config classes: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from typing_extensions import override

import unipar

WORDS, LENGTH = 31, 8


def _create(model: Any, config: Any, sizes: dict[str, Any]) -> nn.Module:
    """Return a model of these sizes; Any, because configs of transformers are typed for some checkers only."""
    return model(config(use_cache=False, **sizes))


class _LanguageModel(unipar.Task):
    """Next-word prediction by a model that computes its own loss."""

    @override
    def data(self) -> Any:
        return TensorDataset(torch.randint(0, WORDS, (64, LENGTH), generator=Generator().manual_seed(0)))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        (words,) = batch
        return model(input_ids=words, labels=words).loss


class Gpt2(_LanguageModel):
    @override
    def model(self) -> nn.Module:
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return _create(GPT2LMHeadModel, GPT2Config, sizes)


class PartlyTrainedBert(unipar.Task):
    """BERT with a frozen lower half; its loss, a mean of what a norm makes, uses no pooler and has little gradient."""

    @override
    def model(self) -> nn.Module:
        sizes = {"vocab_size": 97, "max_position_embeddings": 32, "hidden_size": 48, "intermediate_size": 96}
        layers = {"num_hidden_layers": 4, "num_attention_heads": 4}
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: Any = _create(BertModel, BertConfig, sizes | layers | drops)
        for module in (model.embeddings, *model.encoder.layer[:2]):
            module.requires_grad_(requires_grad=False)
        return model

    @override
    def data(self) -> Any:
        g = Generator().manual_seed(0)
        return TensorDataset(torch.randint(0, 97, (64, 12), generator=g), torch.randn(64, generator=g))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        words, wanted = batch
        return nn.functional.mse_loss(model(input_ids=words).last_hidden_state[:, 0].mean(-1), wanted)


class Mixtral(_LanguageModel):
    """A mixture of experts, whose kernel for experts takes no fp64."""

    def __init__(self, **router: Any) -> None:
        self.router = router

    @override
    def model(self) -> nn.Module:
        sizes = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "hidden_size": 16, "intermediate_size": 16}
        parts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        return _create(MixtralForCausalLM, MixtralConfig, sizes | parts | self.router)
