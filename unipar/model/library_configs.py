"""Configs that modules of transformers and peft carry, as those libraries write them beside weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
"""Names of the files."""


def library_configs(module: nn.Module) -> list[dict[str, Any]]:
    """Return the configs of the outermost modules that have one: file, name of the module, adapter, and content.

    Instead of a content there is `why` there is none.
    """
    rows: list[dict[str, Any]] = []
    inside: dict[str, str] = {}
    for name, inner in module.named_modules():
        of: Any = inner
        peft = type(inner).__module__.partition(".")[0] == "peft"
        if peft and not _is_within(name, inside, ADAPTER_CONFIG) and isinstance(getattr(of, "peft_config", None), dict):
            inside[name] = ADAPTER_CONFIG
            for adapter, config in of.peft_config.items():
                row = {"file": ADAPTER_CONFIG, "under": name, "adapter": adapter}
                rows.append(row | _content_or_why(partial(_adapter_config, of, config)))
        elif (
            not peft
            and not _is_within(name, inside, MODEL_CONFIG)
            and callable(getattr(of, "save_pretrained", None))
            and callable(getattr(getattr(of, "config", None), "to_json_string", None))
        ):
            inside[name] = MODEL_CONFIG
            row = {"file": MODEL_CONFIG, "under": name, "adapter": None}
            rows.append(row | _content_or_why(partial(_model_config, of)))
    return rows


def _is_within(name: str, inside: dict[str, str], file: str) -> bool:
    """Return whether a module is inside one whose config of this kind was found."""
    return any(known == file and (not at or name.startswith(f"{at}.")) for at, known in inside.items())


def _content_or_why(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"content": read()}
    except Exception as e:  # of the library, or of a config of the user's
        return {"why": f"{type(e).__name__}: {e}"}


def _model_config(module: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(module.config.to_json_string())
    return content if content.get("architectures") else content | {"architectures": [type(module).__name__]}


def _adapter_config(module: Any, config: Any) -> dict[str, Any]:
    own = deepcopy(config)
    own.inference_mode = True  # as peft saves it: the reader decides whether it trains
    base = getattr(getattr(module, "base_model", None), "model", None)
    if own.base_model_name_or_path is None:
        own.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    if own.task_type is None and base is not None:
        own.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        own.save_pretrained(folder)
        return json.loads((Path(folder) / ADAPTER_CONFIG).read_text("utf-8"))
