"""Names, limits and dtypes of a checkpoint folder, on which its writer and its readers agree."""

from __future__ import annotations

import re
from math import prod

from unipar.backend import Region

FORMAT = 2
"""Newest version of the format that this unipar reads; it writes it where files beside a checkpoint are in use."""

PLAIN_FORMAT = 1
"""Version of the format of a checkpoint that has all its files in its own folder."""

MANIFEST_FILE = "manifest.json"
SEAL_FILE = "manifest.sha256"
"""SHA-256 of the manifest, as `sha256sum` writes it."""

STATE_FILE = "state.json"
SHARD_FOLDER = "shards"

FROZEN_PREFIX = "frozen-"
"""Beginning of the name of a folder beside the checkpoints that use it, with weights that are not trained."""

TEMPORARY_PREFIX = ".tmp-"
"""Beginning of the name of a folder that is being written, or was when its writer died."""

TRASH_PREFIX = ".trash-"
"""Beginning of the name of a checkpoint that is being deleted."""

LARGEST_HEADER = 32 * 2**20
"""Bytes of a shard's header: Python parses 10 MB a second, and a 7B model of 1,000 tensors needs 0.1 MB."""

MOST_KEYS = 100_000
"""Tensors in one shard; a rank that has more writes several shards."""

LARGEST_JSON = 256 * 2**20
"""Bytes of manifest.json and of state.json: parsing takes some 10 times as much memory."""

DEEPEST_JSON = 64
"""Levels of lists and objects in state.json."""

MOST_DIMENSIONS = 64
"""Dimensions of a tensor, as in torch."""

LONGEST_NAME = 4096
"""Characters of a tensor's name, kind or key."""

LARGEST_NUMBER = 2**63 - 1

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of an element, by dtype, in the spelling of safetensors."""

_STEP = re.compile(r"step-(\d{8,19})\Z", re.ASCII)
_SHARD = re.compile(r"shards/rank-\d{5,9}(-\d{3,6})?\.safetensors\Z", re.ASCII)
_FROZEN_FOLDER = re.compile(r"frozen-[0-9a-f]{8}\Z", re.ASCII)
_FROZEN_SHARD = re.compile(r"frozen-[0-9a-f]{8}/rank-\d{5,9}(-\d{3,6})?\.safetensors\Z", re.ASCII)


def step_folder_name(step: int) -> str:
    """Return the name of the folder of a step: `step-00000042`."""
    return f"step-{step:08d}"


def step_of_folder(name: str) -> int | None:
    """Return the step of a folder's name, or None if it is not the name of a published checkpoint."""
    match = _STEP.match(name)
    step = int(match[1]) if match else None
    return step if step is not None and step_folder_name(step) == name else None


def shard_file_name(rank: int, number: int = 0, folder: str = SHARD_FOLDER) -> str:
    """Return the name of a rank's shard: `shards/rank-00000.safetensors`, then `shards/rank-00000-001.safetensors`."""
    return f"{folder}/rank-{rank:05d}{f'-{number:03d}' if number else ''}.safetensors"


def is_shard_name(name: str) -> bool:
    """Return whether a name in a manifest is that of a shard: in the checkpoint, or beside it in a frozen folder."""
    return _SHARD.match(name) is not None or is_beside(name)


def is_beside(name: str) -> bool:
    """Return whether a file of a checkpoint is in a folder beside it, with weights that are not trained."""
    return _FROZEN_SHARD.match(name) is not None


def is_frozen_folder(name: str) -> bool:
    """Return whether a folder has the name of one that holds weights that are not trained."""
    return _FROZEN_FOLDER.match(name) is not None


def folder_of_shard(name: str) -> str:
    """Return the name of the folder of a shard: `shards`, or `frozen-...` of one that is beside the checkpoint."""
    return name.partition("/")[0]


def normal_region(where: Region) -> Region:
    """Return the region in the form that a manifest holds: runs that touch are one, and one run has no stride."""
    if where.length < 1 or where.runs < 1:
        return Region(0, 0)
    if where.runs == 1 or where.stride == where.length:
        return Region(where.start, where.length * where.runs)
    return where


def piece_shape(shape: tuple[int, ...], where: Region) -> tuple[int, ...]:
    """Return the shape that a piece has in its shard: the tensor's if it is whole, else one row for each run."""
    if where.runs == 1:
        return shape if where.length == prod(shape) else (where.length,)
    return (where.runs, where.length)


def piece_key(name: str, kind: str, where: Region, shape: tuple[int, ...]) -> str:
    """Return the key of a piece in its shard: `KIND:NAME`, and its first element if it is not the whole tensor."""
    is_full = where.runs == 1 and where.length == prod(shape)
    return f"{kind}:{name}" if is_full else f"{kind}:{name}:{where.start}"
