"""Configs of transformers and peft beside exported weights, from what the checkpoint's state.json holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unipar.checkpoint.exporting.selection import rename_beginning

_FILES = {"hf": "config.json", "peft": "adapter_config.json"}
"""Name of the config, by format of the export."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def write_library_config(
    state: Mapping[str, Any],
    folder: Path,
    to: str,
    adapter: str,
    rename: Sequence[tuple[str, str]],
    dtype: str | None,
) -> str:
    """Write the config of the module whose names the export has; return its name, or why there is none, in words.

    `rename`: as for the tensors; it takes away the name of a module within the task's model. `dtype`: of the tensors,
    if it was given.
    """
    if (file := _FILES.get(to)) is None:
        return ""
    configs = [one for one in configs_in(state) if one["file"] == file and one["adapter"] in (None, adapter)]
    here = [one for one in configs if rename_beginning(_beginning_of(one["under"]), rename) == ""]
    if not here:
        library = "transformers" if to == "hf" else f"peft with an adapter {adapter!r}"
        way = f"; one is under {configs[0]['under']}: --rename {configs[0]['under']}.=" if configs else ""
        return f"no {file}: the checkpoint has none, for the task's model is no model of {library}{way}"
    if "content" not in here[0]:
        return f"no {file}: the model's own config could not be written ({here[0].get('why')})"
    content = dict(here[0]["content"])
    if to == "hf" and dtype is not None:
        content["dtype"] = _DTYPES[dtype]
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / file).write_text(text, encoding="utf-8")
    return f"with {file}"


def adapter_config(state: Mapping[str, Any], adapter: str) -> Mapping[str, Any]:
    """Return peft's config of an adapter, from a checkpoint's state; empty if it has none."""
    wanted = (_FILES["peft"], adapter)
    return next((one.get("content", {}) for one in configs_in(state) if (one["file"], one["adapter"]) == wanted), {})


def _beginning_of(under: str) -> str:
    """Return what the names of a module's tensors begin with in the checkpoint."""
    return f"{under}." if under else ""


def configs_in(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configs that a checkpoint's state.json holds; with several parts, names begin with the part's."""
    parts = state.get("parts") or {}
    for part, about in parts.items():
        for one in about.get("configs") or []:
            names = [part] * (len(parts) > 1) + [one["under"]] * bool(one["under"])
            yield one | {"under": ".".join(names)}
