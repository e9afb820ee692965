"""Models that others wrote, as tasks whose samples all have one size."""

from __future__ import annotations

from importlib import import_module
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar

SAMPLES = 128


def _created(model: str, config: str, sizes: dict[str, Any]) -> Any:
    """Return a model of transformers by the names of its class and of its config's."""
    transformers: Any = import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


@final
class TextModel(unipar.Task):
    """Language model of transformers, which computes its loss itself, on texts of one length."""

    def __init__(self, model: str, config: str, sizes: dict[str, Any], length: int = 64) -> None:
        self.created, self.words = (model, config, sizes), length

    @override
    def model(self) -> nn.Module:
        return _created(*self.created)

    @override
    def data(self) -> Any:
        words = self.created[2]["vocab_size"]
        return TensorDataset(
            torch.randint(1, words, (SAMPLES, self.words), generator=Generator().manual_seed(0)),
        )

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        (words,) = batch
        return model(input_ids=words, labels=words).loss


@final
class ImageModel(unipar.Task):
    """Image classifier of transformers, which computes its loss itself, on images of one size."""

    def __init__(self, model: str, config: str, sizes: dict[str, Any], side: int = 32) -> None:
        self.created, self.side = (model, config, sizes), side

    @override
    def model(self) -> nn.Module:
        return _created(*self.created)

    @override
    def data(self) -> Any:
        g = Generator().manual_seed(0)
        images = torch.rand(SAMPLES, 3, self.side, self.side, generator=g)
        return TensorDataset(images, torch.randint(0, 8, (SAMPLES,), generator=g))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss


_WORDS = 2048
PUBLIC_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model": "GPT2LMHeadModel",
        "config": "GPT2Config",
        "sizes": {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": _WORDS},
    },
    "llama": {
        "model": "LlamaForCausalLM",
        "config": "LlamaConfig",
        "sizes": {
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": _WORDS,
        },
    },
    "bert": {
        "model": "BertForMaskedLM",
        "config": "BertConfig",
        "sizes": {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "vocab_size": _WORDS,
        },
    },
    "t5": {
        "model": "T5ForConditionalGeneration",
        "config": "T5Config",
        "sizes": {
            "d_model": 256,
            "d_kv": 64,
            "d_ff": 1024,
            "num_layers": 3,
            "num_heads": 4,
            "vocab_size": _WORDS,
            "decoder_start_token_id": 0,
        },
    },
    "resnet": {
        "model": "ResNetForImageClassification",
        "config": "ResNetConfig",
        "sizes": {
            "embedding_size": 32,
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
            "layer_type": "basic",
            "num_labels": 8,
        },
    },
}
"""Arguments of the tasks; the ResNet's is an ImageModel, the others' a TextModel."""
