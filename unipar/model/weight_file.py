"""Checks of a weight file without torch."""

from __future__ import annotations

import json
import os
import pickletools
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unipar.config.sections.model import Weights
from unipar.errors import BackendNotInstalled, ConfigError
from unipar.utils.text import first_few

PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
"""Suffixes of files that torch.save writes."""


STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save the weights beside other things."""


INDEX_FILE, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
"""Names in a folder as transformers writes it: of the index of several files, or else of the only one."""

_MAX_INDEX_BYTES = 2**26

_MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes that the safetensors library reads."""


_PLAIN_BUILTINS = frozenset(
    ("bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
)


def validate_weight_file(wanted: Weights, roots: Sequence[Path]) -> None:
    """Raise ConfigError unless the file exists, has a consistent header or archive, and holds no code."""
    file = Path(wanted.file)
    if file.is_dir():
        _check_link(file, roots)
        _validate_weight_folder(file, wanted)
        return
    if file.suffix != ".safetensors" and file.suffix not in PICKLE_SUFFIXES:
        known = ", ".join((".safetensors", *PICKLE_SUFFIXES))
        raise ConfigError(f"model.weights: {file} ends in {file.suffix or 'nothing'}; it must be one of {known}")
    if not os.path.lexists(file):
        raise ConfigError(f"model.weights: {file} does not exist; the path is relative to the config")
    _check_link(file, roots)
    if not file.is_file():
        raise ConfigError(
            f"model.weights: {file} is not a file; it must be one file, or a folder as transformers writes it"
        )
    try:
        names = list(read_safetensors_header(file)[1]) if file.suffix == ".safetensors" else _check_pickle(file)
    except OSError as e:
        raise ConfigError(f"model.weights: {file} cannot be read ({e.strerror})") from None
    if names is not None:
        check_weight_patterns(wanted.only, map(strip_wrapper_prefixes, names), f"the names in {file}")
    if file.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise BackendNotInstalled(
            f"model.weights: {file} needs safetensors, not installed here: pip install 'unipar[weights]'"
        )


def _validate_weight_folder(folder: Path, wanted: Weights) -> None:
    """Raise ConfigError unless a folder's files have exactly the tensors that its index names."""
    try:
        placed = _read_index(folder)
        names: list[str] = []
        for file in safetensors_in(folder):
            if not file.exists():
                raise ConfigError(
                    f"model.weights: {folder / INDEX_FILE} names {file.name}, which is not in the folder; "
                    "download or copy it"
                )
            _check_link(file, [folder])
            if not file.is_file():
                raise ConfigError(f"model.weights: {file} is not a file; replace it by one")
            _, inside = read_safetensors_header(file)
            names += inside
            if placed is None:
                continue
            wanted_there = {name for name, called in placed.items() if called == file.name}
            if lacked := sorted(wanted_there - set(inside)):
                raise ConfigError(
                    f"model.weights: {file} does not have {first_few(lacked)}, which the index names; "
                    "download the folder again"
                )
            if extra := sorted(set(inside) - wanted_there):
                raise ConfigError(
                    f"model.weights: {file} has {first_few(extra)}, which the index does not name; "
                    "download the folder again"
                )
    except OSError as e:
        raise ConfigError(f"model.weights: {e.filename} cannot be read ({e.strerror})") from None
    check_weight_patterns(wanted.only, map(strip_wrapper_prefixes, names), f"the names in {folder}")


def safetensors_in(path: Path) -> list[Path]:
    """Return the safetensors files of a path: itself, those that a folder's index names, or the folder's only one."""
    if not path.is_dir():
        return [path]
    placed = _read_index(path)
    return [path / ONE_FILE] if placed is None else [path / name for name in sorted(set(placed.values()))]


def _read_index(folder: Path) -> Mapping[str, str] | None:
    """Return which file has which tensor; None for a folder with one file and no index; raise if there is neither."""
    path = folder / INDEX_FILE
    if not path.exists():
        if (folder / ONE_FILE).exists():
            return None
        raise ConfigError(
            f"model.weights: {folder} is a folder with neither {INDEX_FILE} nor {ONE_FILE}; name a file in it"
        )
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise ConfigError(f"model.weights: {path} has {path.stat().st_size:,} bytes: it is no index")
    try:
        placed: Any = json.loads(path.read_bytes())["weight_map"]
        plain = bool(placed) and all(isinstance(text, str) for pair in placed.items() for text in pair)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        plain, placed = False, {}
    if not plain:
        raise ConfigError(f"model.weights: {path} is no index: it has no weight_map from names to files")
    for name, file in placed.items():
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ConfigError(
                f"model.weights: {path} says that {name} is in {file!r}; it must name a safetensors file in the folder"
            )
    return placed


def strip_wrapper_prefixes(name: str) -> str:
    """Return the name without what wrappers add to it: `module.` of DDP, `_orig_mod.` of torch.compile."""
    steps = [step for step in name.split(".") if step != "_orig_mod"]
    while len(steps) > 1 and steps[0] == "module":
        del steps[0]
    return ".".join(steps)


def matches_any_pattern(name: str, only: Sequence[str]) -> bool:
    """Return whether a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in only)


def check_weight_patterns(only: Sequence[str], names: Iterable[str], called: str) -> None:
    """Raise ConfigError if a pattern matches no name; `called` says in words which names these are."""
    names = list(names)
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"model.weights.only: {pattern!r} matches none of {called} ({first_few(names) or 'there are none'})"
            )


def _check_link(file: Path, roots: Sequence[Path]) -> None:
    """Raise ConfigError if the file is a link inside `roots`, this run's folders, that leads out of all of them."""
    real = file.resolve()
    inside = [root for root in roots if file.is_relative_to(root)]
    if inside and not any(real.is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(
            f"model.weights: {file} is a link that leads out of {inside[0]}, to {real}; name that file itself"
        )


def read_safetensors_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the byte at which tensors begin, and the entries by name; raise if the file has another length."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged_file(
                file, f"its {size:,} bytes hold no complete header: it is truncated, or not a safetensors file"
            )
        text = opened.read(length)
    try:
        header: Any = json.loads(text)
        header.pop("__metadata__", None)
        expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
        raise _damaged_file(file, "its header is not what safetensors writes") from None
    if expected != size:
        short = ": it is truncated" if expected > size else ""
        raise _damaged_file(file, f"its header describes {expected:,} bytes, but it has {size:,}{short}")
    return 8 + length, header


def _check_pickle(file: Path) -> None:
    """Raise ConfigError if the file is not a zip archive of torch.save, or if its pickle names code."""
    if not zipfile.is_zipfile(file):
        raise _damaged_file(
            file, "it is not the archive that torch.save writes: truncated, or from before PyTorch 1.6 (save it again)"
        )
    # this check needs no torch, so that a bad file is refused before any process starts; it is not the protection
    # against code, because the file may change: torch.load(weights_only=True) checks again when it reads
    try:
        with zipfile.ZipFile(file) as archive:
            inner = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            named = sorted(set(_code_in_pickle(archive.read(inner)))) if inner else []
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as e:
        raise _damaged_file(file, str(e)) from None
    if inner is None:
        raise _damaged_file(file, "there is no data.pkl in it, so torch.save did not write it")
    if named:
        raise pickled_code_error(file, named[0])


def pickled_code_error(file: Path, name: str) -> ConfigError:
    """Return the error for a file whose pickle names code."""
    return ConfigError(
        f"model.weights: {file} holds pickled code ({name}), which would run when it is read; save the weights alone: "
        "torch.save(model.state_dict(), file), or as safetensors"
    )


def _damaged_file(file: Path, why: str) -> ConfigError:
    return ConfigError(f"model.weights: {file} is damaged: {why}")


def _code_in_pickle(pickled: bytes) -> Iterator[str]:
    """Yield names of code in a pickle that are neither parts of tensors nor plain containers."""
    texts: list[str] = []
    for opcode, arg, _ in pickletools.genops(pickled):
        if isinstance(arg, str) and "UNICODE" in opcode.name:
            texts.append(arg)
        if opcode.name in ("GLOBAL", "INST"):
            module, _, name = str(arg).partition(" ")
        elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
            module, name = texts[-2:]
        else:
            continue
        top = module.partition(".")[0]
        if top in ("builtins", "__builtin__") and name in _PLAIN_BUILTINS:
            continue
        if top not in ("torch", "collections", "numpy", "_codecs"):
            yield f"{module}.{name}"


def describe_loaded_weights(row: Mapping[str, Any]) -> str:
    """Return one line on what was loaded, from the row in a run log."""
    clauses = [f"{row['loaded']:,} of {row['names']:,} names loaded from {row['file']}"]
    for key, words in (("missing", "not in the file"), ("unexpected", "not in the model"), ("kept", "not asked for")):
        if count := row[key]:
            clauses.append(f"{words}: {first_few(row[f'{key}_names'], count)}")
    return "; ".join(clauses)
