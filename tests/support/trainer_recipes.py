"""Recipes as people write them for transformers' Trainer: small models from config classes, and made-up samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from typing_extensions import override

import unipar

WORDS, LENGTH = 32, 8
Sample = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """Samples that are made by their number."""

    def __init__(self, make: Callable[[torch.Generator], Sample], size: int) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    @override
    def __getitem__(self, index: int) -> Sample:
        return self.make(torch.Generator().manual_seed(index))


def _sentence(generator: torch.Generator) -> Sample:
    end = int(torch.randint(3, LENGTH + 1, (), generator=generator))
    words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
    mask = (torch.arange(LENGTH) < end).long()
    return {"input_ids": words * mask, "attention_mask": mask, "labels": words[0] % 2}


def _answer(generator: torch.Generator) -> Sample:
    """A prompt that is not learned, an answer that is, and padding."""
    first, end = (int(n) for n in torch.randint(1, LENGTH // 2, (2,), generator=generator))
    words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
    learned = (torch.arange(LENGTH) >= first) & (torch.arange(LENGTH) < LENGTH // 2 + end)
    return {"input_ids": words, "labels": torch.where(learned, words, -100)}


def _text(generator: torch.Generator) -> Sample:
    words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
    return {"input_ids": words, "labels": words}


def _translation(generator: torch.Generator) -> Sample:
    sample = _answer(generator)
    return sample | {"labels": sample["labels"].roll(-3)}


def _image(generator: torch.Generator) -> Sample:
    pixels = torch.randn(3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": (pixels.sum() > 0).long()}


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def _bert() -> Any:
    sizes: dict[str, Any] = _SMALL | _NO_DROPOUT
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def _gpt2() -> Any:
    drop: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, use_cache=False, **drop)
    return GPT2LMHeadModel(sizes)


def _t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **sizes))


def _llama() -> Any:
    sizes: dict[str, Any] = _SMALL | {"num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, use_cache=False, **sizes))


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model  # seconds, which the other recipes do without

    modules = ["q_proj", "v_proj"]
    return get_peft_model(_llama(), LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM"))


def _vit() -> Any:
    sizes: dict[str, Any] = _SMALL | _NO_DROPOUT
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **sizes))


def _resnet() -> Any:
    sizes: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=2, **sizes))


def _learned_next_words(batch: Any) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


@dataclass(frozen=True)
class Recipe:
    """Model, samples, and arguments of the Trainer."""

    model: Callable[[], Any]
    sample: Callable[[torch.Generator], Sample]
    size: int
    """Number of samples."""

    arguments: Mapping[str, Any]
    weight: Callable[[Any], Tensor] | None = None
    """Number of items that a batch's loss is a mean over; None: its samples."""


RECIPES: Mapping[str, Recipe] = {
    "bert": Recipe(
        _bert, _sentence, 22,
        {"per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 2e-3, "weight_decay": 0.01,
         "warmup_steps": 0.1},
    ),
    "gpt2": Recipe(
        _gpt2, _answer, 64,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 8, "learning_rate": 5e-3,
         "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5},
        _learned_next_words,
    ),
    "t5": Recipe(
        _t5, _translation, 64,
        {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-3, "weight_decay": 0.5,
         "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-5}},
    ),
    "lora": Recipe(
        _lora, _answer, 19,
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
         "learning_rate": 2e-2, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "max_grad_norm": 0.3},
        _learned_next_words,
    ),
    "llama": Recipe(
        _llama, _text, 64,
        {"per_device_train_batch_size": 8, "max_steps": 10, "learning_rate": 3e-3, "weight_decay": 0.1,
         "adam_beta2": 0.95, "adam_epsilon": 1e-6, "bf16": False, "lr_scheduler_type": "cosine_with_min_lr",
         "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 3},
        _learned_next_words,
    ),
    "vit": Recipe(
        _vit, _image, 24,
        {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-3, "weight_decay": 0.05,
         "lr_scheduler_type": "constant"},
    ),
    "resnet": Recipe(
        _resnet, _image, 32,
        {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 0.05, "weight_decay": 0.1,
         "optim": "sgd", "lr_scheduler_type": "linear", "max_grad_norm": 1.0},
    ),
}  # fmt: skip
"""Recipes by the family of their model."""

READ_IN_ORDER: Mapping[str, Any] = {"train_sampling_strategy": "sequential", "use_cpu": True, "logging_steps": 1}
"""Arguments by which the Trainer and unipar read the same samples, and log each step."""


def model_of(recipe: Recipe) -> nn.Module:
    """Return the model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return recipe.model()


class Trained(unipar.Task):
    """A recipe as a task."""

    def __init__(self, name: str) -> None:
        self.recipe = RECIPES[name]

    @override
    def model(self) -> nn.Module:
        return model_of(self.recipe)

    @override
    def data(self) -> Samples:
        return Samples(self.recipe.sample, self.recipe.size)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss

    @override
    def weight(self, batch: Any) -> Tensor | None:
        return self.recipe.weight(batch) if self.recipe.weight else None
