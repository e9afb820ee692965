"""Contents of one checkpoint, in words and as data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from unipar.checkpoint.format.manifest import Manifest, StoredTensor, is_kept_beside
from unipar.checkpoint.format.names import ITEM_BYTES, is_beside
from unipar.checkpoint.overview.listing import format_metrics
from unipar.checkpoint.protocol.verifying import CheckpointContents
from unipar.utils.table import format_table
from unipar.utils.text import count_of, first_few, format_age, format_size


def tensor_size(tensor: StoredTensor) -> int:
    """Return the number of bytes of a tensor's elements."""
    return prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def describe_checkpoint(contents: CheckpointContents, only: str = "*", width: int = 80) -> str:
    """Return the contents of a checkpoint: sentences on its state, then a table of tensors whose names match."""
    lines = [str(contents.path), *_sentences(contents.state, contents.manifest)]
    return "\n".join([*lines, "", _table(contents.manifest, only, width)])


def checkpoint_as_data(contents: CheckpointContents, only: str = "*") -> dict[str, Any]:
    """Return the contents of a checkpoint for `--json`."""
    tensors = [t for _, t in sorted(contents.manifest.tensors.items()) if fnmatchcase(t.name, only)]
    return {
        "path": str(contents.path),
        "step": contents.manifest.step,
        "bytes": contents.manifest.bytes,
        "bytes_beside": contents.manifest.bytes_beside,
        "files": {name: record._asdict() for name, record in sorted(contents.manifest.files.items())},
        "tensors": [
            {
                "name": t.name,
                "kind": t.kind,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "bytes": tensor_size(t),
                "pieces": len(t.pieces),
            }
            for t in tensors
        ],
        "state": contents.state,
    }


def _sentences(state: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    of = f" of {state['steps']:,}" if isinstance(state.get("steps"), int) else ""
    saved = f", saved {_moment(state['time'])}" if state.get("time") else ""
    ranks = f" on {count_of(state['ranks'], 'rank')}" if state.get("ranks") else ""
    by = f" by {state['strategy']}{ranks}" if state.get("strategy") else ""
    yield f"step {manifest.step:,}{of}{saved}{by}"
    if state.get("imported"):
        yield f"imported from {state['imported']}"
    if versions := state.get("unipar"):
        yield "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if git := state.get("git"):
        yield f"git: {git}"
    if data := state.get("data"):
        length = "unknown length" if data.get("length") is None else f"{data['length']:,} samples"
        yield f"data: epoch {data.get('epoch', '?')}, next sample {data.get('sample', '?')}, {length}"
    if metrics := state.get("metrics"):
        evaluated = state.get("evaluated")
        yield f"metrics: {format_metrics(metrics, evaluated if evaluated != manifest.step else None)}"
    if best := state.get("best"):
        yield "best: " + ", ".join(f"step {step:,} ({value:.6g})" for step, value in best)
    for name, part in (state.get("parts") or {}).items():
        yield from _part_sentences(name if len(state["parts"]) > 1 else "", part)
    if task := state.get("task"):
        yield f"the task's own state: {first_few(list(task), most=8) if isinstance(task, dict) else task}"
    beside = manifest.folders_beside
    files = sum(not is_beside(name) for name in manifest.files) - 1
    kinds = Counter[str]()
    for tensor in manifest.tensors.values():
        kinds[tensor.kind] += tensor_size(tensor)
    sizes = ", ".join(f"{kind} {format_size(size)}" for kind, size in kinds.most_common())
    yield f"{format_size(manifest.bytes)} in {count_of(files, 'shard')}: {sizes}"
    if beside:
        shared = sum(map(is_kept_beside, manifest.tensors.values()))
        yield (
            f"{format_size(manifest.bytes_beside)} in {first_few(sorted(beside))} beside the checkpoint: "
            f"{count_of(shared, 'frozen weight')}, shared with others"
        )


def _part_sentences(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    of = f" of {name!r}" if name else ""
    for number, group in enumerate(part.get("groups") or []):
        settings = ", ".join(f"{key} {value}" for key, value in group["settings"].items() if value is not None)
        yield f"optimizer group {number}{of}: {settings}"
    if skipped := part.get("skipped"):
        yield f"steps whose update was skipped{of}, for a norm that was not finite: {skipped}"
    if counters := part.get("counters"):
        yield f"numbers of the engine{of}: " + ", ".join(f"{key} {value:g}" for key, value in counters.items())
    for names in part.get("tied") or []:
        yield f"one parameter{of}: {' = '.join(names)}"


def _moment(seconds: float) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{at}, {format_age(time.time() - seconds)} ago"


def _table(manifest: Manifest, only: str, width: int) -> str:
    """Return one row for each name, shape and dtype, with the kinds that are saved of it and their bytes together."""
    kinds: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    sizes = Counter[tuple[str, tuple[int, ...], str]]()
    for (name, kind), t in sorted(manifest.tensors.items(), key=lambda item: (item[0][0], item[0][1] != "weight")):
        if fnmatchcase(name, only):
            kinds.setdefault((name, t.shape, t.dtype), []).append(kind)
            sizes[name, t.shape, t.dtype] += tensor_size(t)
    rows = [[key[0], str(list(key[1])), key[2], format_size(sizes[key]), " ".join(kinds[key])] for key in kinds]
    return format_table(["name", "shape", "dtype", "size", "kinds"], rows, right=(3,), width=width)
