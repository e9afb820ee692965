"""Files of other libraries, written from a checkpoint one tensor at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from unipar.backend.engine import KIND_OF_AVERAGES
from unipar.checkpoint.exporting.checkpoint_tensors import Advance, ExportSource
from unipar.checkpoint.exporting.config_files import adapter_config, write_library_config
from unipar.checkpoint.exporting.selection import ChosenTensor, adapter_tensors, choose_tensors
from unipar.checkpoint.format.shard_file import ShardTensor, write_shard
from unipar.checkpoint.protocol.verifying import CheckpointContents
from unipar.checkpoint.saved_state import SavedState
from unipar.checkpoint.storage.disk import Disk
from unipar.errors import CheckpointError, OutExists
from unipar.utils.text import did_you_mean, first_few, format_size

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtypes by the words of `--dtype`."""

FILE_OF_FORMAT = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "hf": "-hf",
    "peft": "-peft",
    "dcp": "-dcp",
}
"""End of the name that an export gets if none is given, by format; one with a dot is a file, else a folder."""

_WEIGHTS = ("averages", "raw")
"""Values of `--weights`."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class ExportWish:
    """Export that the command asks for."""

    to: str = "safetensors"
    only: Sequence[str] = ()
    trainable: bool = False
    weights: str = "averages"
    """`averages`: of weights that have a moving average, that; `raw`: the weights themselves."""

    rename: Sequence[tuple[str, str]] = ()
    dtype: str | None = None
    size: str = "5GB"
    """Largest file of `hf`."""

    adapter: str = "default"
    """Name of the adapter for `peft`."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Export that was written."""

    path: Path
    tensors: int
    averages: int
    """Number of tensors that are moving averages of weights."""

    bytes: int
    """Bytes of tensors."""

    files: int
    config: str = ""
    """Remark on the config beside the weights: its name, or why there is none; "" for formats without."""

    left_out: str = ""
    """Remark on trained parameters that an adapter's file has no place for; "" if there are none."""


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as 5GB, 500MB or 2GiB."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text[len(digits) :].upper() or "B"
    try:
        size = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise CheckpointError(f"--size {text}: not a size; write it as 5GB, 500MB or 2GiB") from None
    if size < 1:
        raise CheckpointError(f"--size {text}: a file must hold at least one byte")
    return size


def export_checkpoint(
    contents: CheckpointContents,
    out: Path | None,
    wish: ExportWish,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the weights of a checkpoint that was verified, as a whole or not at all."""
    if wish.to not in FILE_OF_FORMAT:
        known = ", ".join(FILE_OF_FORMAT)
        raise CheckpointError(f"--to {wish.to}: known are {known}{did_you_mean(wish.to, FILE_OF_FORMAT)}")
    if wish.dtype is not None and wish.dtype not in EXPORT_DTYPES:
        raise CheckpointError(f"--dtype {wish.dtype}: known are {', '.join(EXPORT_DTYPES)}")
    if wish.weights not in _WEIGHTS:
        known = " and ".join(_WEIGHTS)
        raise CheckpointError(f"--weights {wish.weights}: known are {known}{did_you_mean(wish.weights, _WEIGHTS)}")
    largest = parse_size(wish.size)
    chosen = choose_tensors(
        contents,
        only=wish.only,
        trainable=wish.trainable or wish.to == "peft",
        rename=wish.rename,
        averages=wish.weights == "averages",
    )
    left: list[str] = []
    if wish.to == "peft":
        chosen, left = adapter_tensors(chosen, wish.adapter, adapter_config(contents.state, wish.adapter))
    out = Path(f"{contents.path.name}{FILE_OF_FORMAT[wish.to]}") if out is None else out
    if os.path.lexists(out):
        raise OutExists(f"-o {out}: it already exists; name another one, or delete it")
    dtype = None if wish.dtype is None else EXPORT_DTYPES[wish.dtype]
    with SavedState(contents.path, contents.manifest) as state:
        source = ExportSource(state, chosen, dtype)
        advance = _Progress(source.total, progress)
        with _atomic_output(out, source.total) as partial_out:
            files = _WRITERS[wish.to](source, partial_out, largest, advance)
            note = write_library_config(contents.state, partial_out, wish.to, wish.adapter, wish.rename, wish.dtype)
    if note and wish.to == "hf" and (wish.only or wish.trainable):
        note += "; only a part of its weights is here"
    return Exported(
        path=out,
        tensors=len(chosen),
        averages=sum(tensor.stored.kind == KIND_OF_AVERAGES for tensor in chosen),
        bytes=source.total,
        files=files,
        config=note,
        left_out=_left_out(left),
    )


def _left_out(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"left out, although trained, since they are not the adapter's: {first_few(names)}; to have them too: "
        "--to safetensors --trainable"
    )


class _Progress:
    """Callback that adds up bytes."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self._total, self._tell, self._done = total, tell, 0

    def __call__(self, count: int) -> None:
        self._done += count
        if self._tell is not None:
            self._tell(min(self._done, self._total), self._total)


@contextmanager
def _atomic_output(out: Path, needed: int) -> Generator[Path]:
    """Context manager: yields a temporary path beside `out`, which gets its name if the body succeeds."""
    part = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if needed > free:
            raise CheckpointError(f"-o {out}: it needs {format_size(needed)} and {format_size(free)} are free")
        yield part
        part.rename(out)
    except OSError as e:
        raise CheckpointError(f"-o {out}: it cannot be written ({e.strerror or e}); choose another path") from e
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            with suppress(OSError):
                part.unlink()


def _write_file(source: ExportSource, path: Path, tensors: Sequence[ChosenTensor], advance: Advance) -> None:
    """Write some tensors as one safetensors file; a parameter with several names is there under its first."""
    rows = [
        ShardTensor(tensor.name, source.dtype_name(tensor), tensor.stored.shape, partial(source.memory, tensor))
        for tensor in tensors
    ]
    write_shard(Disk(), path, rows, progress=advance)


def _write_safetensors(source: ExportSource, out: Path, largest: int, advance: Advance) -> int:
    _write_file(source, out, source.chosen, advance)
    return 1


def _write_adapter(source: ExportSource, out: Path, largest: int, advance: Advance) -> int:
    out.mkdir()
    _write_file(source, out / "adapter_model.safetensors", source.chosen, advance)
    return 1


def _write_hf(source: ExportSource, out: Path, largest: int, advance: Advance) -> int:
    """Write `model.safetensors`, or several files and the index that tells where each tensor is."""
    out.mkdir()
    files = _split(source, largest)
    if len(files) == 1:
        _write_file(source, out / "model.safetensors", files[0], advance)
        return 1
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(source, out / name, tensors, advance)
        places |= {tensor.name: name for tensor in tensors}
    metadata = {
        "total_size": source.total,
        "total_parameters": sum(t.stored.numel for t in source.chosen if t.stored.kind == "weight"),
    }
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(files)


def _split(source: ExportSource, largest: int) -> list[list[ChosenTensor]]:
    """Return tensors by file: as many in a file as `largest` bytes hold, at least one."""
    files: list[list[ChosenTensor]] = [[]]
    filled = 0
    for tensor in source.chosen:
        size = source.bytes(tensor)
        if files[-1] and filled + size > largest:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += size
    return files


def _write_torch(source: ExportSource, out: Path, largest: int, advance: Advance) -> int:
    with source.mapped(out.parent, advance) as tensors, out.open("wb") as file:
        torch.save(tensors, file)  # given a path, torch refuses names that begin with a dot
    return 1


def _write_dcp(source: ExportSource, out: Path, largest: int, advance: Advance) -> int:
    import torch.distributed.checkpoint as dcp

    with source.mapped(out.parent, advance) as tensors, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(out), no_dist=True)
    return sum(1 for file in out.iterdir() if file.suffix == ".distcp")


_WRITERS: dict[str, Callable[[ExportSource, Path, int, Advance], int]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "hf": _write_hf,
    "peft": _write_adapter,
    "dcp": _write_dcp,
}
