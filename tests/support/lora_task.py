"""Task that trains a LoRA adapter over a small GPT-2, with one more layer that is trained as a whole."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from typing_extensions import override

from tests.support.transformer_models import Gpt2


def lora_model() -> Any:
    """Return the model as the task makes it; the adapter's second matrix begins at zero."""
    torch.manual_seed(3)
    made: Any = get_peft_model(
        Gpt2().model(),  # pyright: ignore[reportArgumentType]
        LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True),
    )
    return made


class Lora(Gpt2):
    @override
    def model(self) -> nn.Module:
        return lora_model()
