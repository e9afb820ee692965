"""LoRA by peft over the frozen Llama of causal_lm.py, on docstrings of Python's standard library."""
# pyright: reportImplicitOverride=false

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path
from typing import Any

from causal_lm import CausalLM
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

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
        base: Any = LlamaForCausalLM.from_pretrained(self.base) if self.base else super().model()
        adapter = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(base, adapter)


if __name__ == "__main__":
    config = Path(__file__).parents[1] / "configs" / "lora.yaml"
    print(unipar.launch(config, task=Lora, overwrite="--overwrite" in sys.argv))
