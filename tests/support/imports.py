"""Configs of other libraries, as `unipar import` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unipar.config import safe_yaml
from unipar.conversion.import_config import ImportedConfig, import_library_config

STEPS = "train.steps=100"


ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}


LEAST: dict[str, Any] = {"train_batch_size": 32, "optimizer": ADAMW}


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: bf16
downcast_bf16: 'no'
"""


ASKED = ("batch.total=32", "train.optimizer={name: sgd, lr: 0.1}", STEPS)


def recipe(folder: Path, arguments: dict[str, Any], *sets: str, strict: bool = False, **changes: Any) -> ImportedConfig:
    """Return the import of a file of training arguments, some of them changed."""
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(arguments | changes), encoding="utf-8")
    return import_library_config(file, sets, strict=strict)


def optimizer(made: ImportedConfig) -> dict[str, Any]:
    return said(made)["train"]["optimizer"]


def ds(folder: Path, text: dict[str, Any] | str, *sets: str, strict: bool = True, **more: Any) -> ImportedConfig:
    file = folder / "ds_config.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text, indent=1), encoding="utf-8")
    return import_library_config(file, sets, strict=strict, **more)


def yaml(folder: Path, text: str, *sets: str, strict: bool = True, **more: Any) -> ImportedConfig:
    file = folder / "accelerate.yaml"
    file.write_text(text, encoding="utf-8")
    return import_library_config(file, sets, strict=strict, **more)


def said(made: ImportedConfig) -> dict[str, Any]:
    """The config that was written, as it reads."""
    return safe_yaml.parse_yaml(made.text)[0]
