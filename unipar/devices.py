"""How many GPUs this process may use, and so how many ranks `auto` means. Counted without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unipar import registry
from unipar.config import Cell, Config
from unipar.errors import Unsupported, WorldMismatch
from unipar.place import Place, probe

CHOICE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Ranks:
    """A number of ranks, and why it is that."""

    number: int
    why: str = ""
    """Empty where the config says the number itself."""


def ranks(config: Config, place: Place | None = None) -> Ranks:
    """The ranks of a run: what the config says, or the world found, or the visible GPUs, or one."""
    backend = registry.find(config.backend)
    cell = registry.cell_in(backend, config)
    return ranks_in(cell, config, place, alone=registry.is_alone(backend, cell))


def ranks_in(cell: Cell, config: Config, place: Place | None, *, alone: bool) -> Ranks:
    """Return the ranks of a run whose cell is known, and whether that is one process by itself."""
    said = config.parallel.data
    if alone:
        return Ranks(1, f"{cell} is one process")
    if place is not None:
        if said not in ("auto", place.size):
            raise WorldMismatch(
                f"parallel.data: {said}, but {place.launcher} started {place.size} "
                f"process{'es' * (place.size > 1)}; give it {said}, or say auto"
            )
        return Ranks(place.size, f"started by {place.launcher}")
    if said != "auto":
        return Ranks(said)
    if config.device == "cpu":
        return Ranks(1, "auto: no launcher, and device is cpu")
    if ":" in config.device:
        return Ranks(1, f"auto: no launcher, and device is {config.device} alone")
    gpus = visible_gpus()
    return Ranks(gpus or 1, f"auto: no launcher, {_gpus(gpus)} visible here")


def found() -> Place | None:
    """The world in which a foreign launcher started this process."""
    return probe(registry.launchers())


def device(config: Config) -> tuple[str, str]:
    """`cpu`, `cuda` or `cuda:N`, and why where the config leaves it open."""
    if config.device != "auto":
        return config.device, ""
    gpus = visible_gpus()
    return ("cuda" if gpus else "cpu"), f"auto: {_gpus(gpus)} visible here"


def check_enough(config: Config, number: int, local: int | None = None, asked: str = "parallel.data") -> None:
    """Refuse ranks that would find no GPU of their own; `local` of them are here, and `asked` said how many."""
    kind, _ = device(config)
    if kind == "cpu":
        return
    gpus, wanted = visible_gpus(), local or number
    if ":" in kind:
        index = int(kind.partition(":")[2])
        if index >= gpus:
            raise _too_few(config, f"device: {kind} is not there; {_gpus(gpus)} visible here", "say device: cpu")
    elif wanted > gpus:
        ways = "say device: cpu" if not gpus else "lower it, say device: cpu, or share one GPU by device: cuda:0"
        raise _too_few(config, f"{asked}: {wanted} ranks on cuda; {_gpus(gpus)} visible here", ways)


def _too_few(config: Config, what: str, way: str) -> Unsupported:
    choice = os.environ.get(CHOICE)
    limit = f" ({CHOICE}={choice})" if choice is not None else ""
    return Unsupported(str(registry.cell_of(config)), [f"{what}{limit}; {way}"])


def _gpus(number: int) -> str:
    return "no GPU" if number == 0 else "one GPU" if number == 1 else f"{number} GPUs"


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that CUDA would show to torch here; 0 where torch was built without CUDA."""
    if not torch_has_cuda():
        return 0
    return chosen(gpu_ids(), environ.get(CHOICE))


def chosen(ids: list[str], choice: str | None) -> int:
    """How many of the GPUs a CUDA_VISIBLE_DEVICES leaves: it ends at the first entry that is none of them."""
    if choice is None:
        return len(ids)
    seen: set[str] = set()
    for word in (w.strip() for w in choice.split(",")):
        if word.isdecimal() and int(word) < len(ids):
            one = ids[int(word)]
        elif word.startswith("GPU-"):
            matches = [i for i in ids if i.startswith(word)]
            if len(matches) != 1:
                break
            (one,) = matches
        elif word.startswith("MIG-"):
            one = word  # a slice of a GPU; whether it exists, CUDA will say
        else:
            break
        if one in seen:
            return 0  # CUDA shows nothing at all then
        seen.add(one)
    return len(seen)


def gpu_ids() -> list[str]:
    """Return the UUIDs of this machine's NVIDIA GPUs, in the order of their bus; none without a driver."""
    import pynvml  # takes a while, and is needed only where torch was built with CUDA

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_uuid(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _uuid(nvml: Any, index: int) -> str:
    try:
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return f"unknown-{index}"


def torch_has_cuda() -> bool:
    """Whether the torch installed here was built with CUDA: its version file says so, without an import."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        said = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=\n]*=\s*None", said, re.MULTILINE) is None
