"""LoRA by peft over the frozen bf16 Llama of causal_lm.py, on docstrings: `unipar run configs/lora.yaml`."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from causal_lm import CausalLM
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM as Llama
from transformers import LlamaConfig

import unipar

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Lora(CausalLM):
    def __init__(self, base: str | None = None, rank: int = 8, **sizes: Any) -> None:
        """`base`: a folder that `unipar checkpoint export --to hf` has written; without it, initial weights."""
        super().__init__(**sizes)
        self.base, self.rank = base, rank

    def documents(self) -> list[str]:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
        nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
        texts = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED))
        return [text for text in texts if text]

    def model(self) -> nn.Module:
        """Return the Llama in bf16, frozen, with adapters in fp32, as peft makes them."""
        dtype = {"dtype": torch.bfloat16}
        sizes = LlamaConfig(**self.sizes)
        base: Any = Llama.from_pretrained(self.base, **dtype) if self.base else Llama.from_config(sizes, **dtype)
        adapter = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(base, adapter)


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "lora.yaml"
    print(unipar.launch(config, task=Lora, overwrite="--overwrite" in sys.argv))
