"""Public models from the numbers of their configs: `unipar plan configs/recipes/llama3_8b_full.yaml --world 8`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import unipar


class PublicModel(unipar.Task):
    """A causal language model, of which `model.weights` may load the hub's files; docs/recipes.md has configs for it.

    With a file of tokens it trains; without one, every token is 0, which is enough for a plan.
    """

    def __init__(
        self,
        family: str,
        sizes: dict[str, Any],
        length: int,
        tokens: str | None = None,
        lora: int = 0,
        targets: str | list[str] = "all-linear",
        chunks: int = 1,
        base: str = "bfloat16",
    ) -> None:
        """Take a model's type and the numbers of its config.

        `tokens`: file of 32-bit numbers. `lora`: rank of adapters over frozen weights in `base`; 0: all is trained.
        `chunks`: parts of a sequence whose logits are computed one after the other, and again in backward.
        """
        self.family, self.sizes, self.words, self.tokens = family, sizes, length, tokens
        self.lora, self.targets, self.chunks, self.base = lora, targets, chunks, base

    def model(self) -> nn.Module:
        config = AutoConfig.for_model(self.family, **{"use_cache": False, **self.sizes})
        dtype = {"dtype": getattr(torch, self.base)} if self.lora else {}
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **dtype)
        if self.chunks > 1:
            model.forward = partial(loss_in_chunks, model, self.chunks)
        if not self.lora:
            return model
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=self.lora, lora_alpha=2 * self.lora, target_modules=self.targets, task_type="CAUSAL_LM")
        return get_peft_model(model, adapter)

    def data(self) -> list[Tensor]:
        if self.tokens is None:
            return [torch.zeros(self.words, dtype=torch.int32)] * 4096
        tokens = torch.from_file(self.tokens, size=Path(self.tokens).stat().st_size // 4, dtype=torch.int32)
        return list(tokens[: len(tokens) // self.words * self.words].view(-1, self.words))

    def weight(self, batch: Tensor) -> float:
        return float(batch[:, 1:].numel())  # the first token is not predicted

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        tokens = batch.long()
        return model(input_ids=tokens, labels=tokens).loss


class Loss:
    """Output of a model that computes its loss alone."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def loss_in_chunks(model: Any, chunks: int, input_ids: Tensor, labels: Tensor, **settings: Any) -> Any:
    """Return the loss of a causal model; logits of one chunk of a sequence are there at a time."""
    hidden = model.model(input_ids=input_ids, **settings).last_hidden_state[:, :-1]
    parts = zip(hidden.chunk(chunks, 1), labels[:, 1:].chunk(chunks, 1), strict=True)
    losses = [checkpoint(_sum_of_losses, model.lm_head, *part, use_reentrant=False) for part in parts]
    return Loss(torch.stack(losses).sum() / labels[:, 1:].numel())


def _sum_of_losses(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten(), reduction="sum")
