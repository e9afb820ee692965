"""Out of memory, in a sentence."""

from __future__ import annotations

import errno
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.config.settled import read_settled
from unipar.errors import OutOfMemory, ReportError, UniparError
from unipar.memory.account import read_account
from unipar.planning.estimate import estimate_kept_bytes, suggest_what_fits
from unipar.run_folder.heartbeat import LastPhase
from unipar.run_folder.layout import ledger_path
from unipar.run_folder.ledger import Ledger
from unipar.utils.procfs import memory_left
from unipar.utils.text import format_size

if TYPE_CHECKING:
    from unipar.training.run import TrainingRun


_OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "Unable to allocate",
)
"""What torch, CUDA, C++, the system and numpy say."""


_REQUESTED_SIZE = re.compile(r"(?i)(?:allocate|allocating)\D{0,20}?(\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")


_BYTES_PER_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is what it says, or what it comes from."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return not isinstance(error, UniparError)
    if isinstance(error, UniparError):
        return False
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY_PHRASES)
    return said or (error.__cause__ is not None and is_out_of_memory(error.__cause__))


def requested_bytes(error: BaseException) -> int | None:
    """The bytes that could not be had, where the error tells."""
    found = _REQUESTED_SIZE.search(str(error))
    return int(float(found[1]) * _BYTES_PER_UNIT[found[2]]) if found else None


@contextmanager
def explain_out_of_memory(run: Path, rank: int, live: TrainingRun | None = None) -> Generator[None]:
    """What runs out of memory in the body leaves it as OutOfMemory; `live` is not there while it is built."""
    try:
        yield
    except BaseException as e:
        said = as_out_of_memory(e, run, rank, live)
        if said is e:
            raise
        raise said from e


def as_out_of_memory(error: BaseException, run: Path, rank: int, live: TrainingRun | None = None) -> BaseException:
    """The same as OutOfMemory where it is that; any other as it is."""
    if not is_out_of_memory(error):
        return error
    try:
        made = OutOfMemory(_out_of_memory_sentence(error, run, rank, live))
    except Exception as e:  # whatever it is: the error itself matters more
        error.add_note(f"unipar could not say more of it: {type(e).__name__}: {e}")
        return error
    made.__cause__ = error
    return made


def _out_of_memory_sentence(error: BaseException, run: Path, rank: int, live: TrainingRun | None) -> str:
    at = LastPhase.of(run, rank) or LastPhase("start", 0)
    wanted = requested_bytes(error)
    device = live.device.type if live is not None else "cpu"
    on_cuda = live is None and "CUDA" in str(error)  # nothing is built: the error itself tells whose memory it was
    left = _available_bytes(live) if live is not None else _available_bytes_on_cuda() if on_cuda else memory_left()
    said = f"rank {rank} ran out of memory {at}"
    if wanted is not None:
        said += f": {format_size(wanted)} more were asked for, about {format_size(left)} were left"
    if live is None:
        settled = read_settled(run)
        config, sizes, parameters, parts, beside = settled.config, settled.sizes, 0, {}, None
    else:
        from unipar.memory.recording.holdings import bytes_held_by

        start = _last_event(run, rank, "start")
        config, sizes, parameters = live.config, live.sizes, int(start["parameters"])
        parts = bytes_held_by((part.engine for part in live.parts.values()), device)
        beside = max(0, _bytes_in_use(live, int(start["resident"])) - sum(parts.values()))
    lack = None if wanted is None else max(1, wanted - left)
    moving = None if beside is None else beside + (wanted or 0)
    more = [
        describe_largest_holders(parts, beside),
        suggest_what_fits(config, sizes, parameters, at.phase, moving=moving, lack=lack),
    ]
    return "; ".join([said, *filter(None, more)])


def describe_largest_holders(parts: Mapping[Any, int], beside: int | None) -> str:
    """What held the most, and the rest in order."""
    named = [*parts.items(), *([("activations and all else", beside)] if beside else [])]
    ranked = sorted(((name, number) for name, number in named if number), key=lambda item: -item[1])
    if not ranked:
        return ""
    (first, number), *others = ranked
    about = "about " if beside and first not in parts else ""
    rest = ", ".join(f"{name} {format_size(number)}" for name, number in others)
    return f"the most was held by {first}, {about}{format_size(number)}" + (f" ({rest})" if rest else "")


def describe_killed_rank(run: Path, rank: int) -> str:
    """What can be told of a rank that could not say why it ended: nothing, if it did not come so far."""
    with suppress(FileNotFoundError):
        settled, at, start = read_settled(run), LastPhase.of(run, rank), _last_event(run, rank, "start")
        if at is None or not start:
            return ""
        parameters = int(start["parameters"])
        said = (
            _describe_recorded_memory(run, rank)
            or f"by an estimate {describe_largest_holders(estimate_kept_bytes(settled.config, settled.ranks, parameters), None)}"
        )
        return f"{said}; {suggest_what_fits(settled.config, settled.sizes, parameters, at.phase)}"
    return ""


def _describe_recorded_memory(run: Path, rank: int) -> str:
    """What held the most when its memory was last watched; empty: it never was."""
    step = _last_event(run, rank, "step")
    if step.get("memory"):
        fullest = max(step["memory"], key=lambda phase: phase["peak"])
        return f"in step {step['step']} {describe_largest_holders(fullest['held'], None)}"
    with suppress(ReportError):
        fullest = read_account(run, rank).peak
        return f"in the {fullest.name} of a watched step {describe_largest_holders(fullest.held, None)}"
    return ""


def _last_event(run: Path, rank: int, event: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    for row in Ledger.read(ledger_path(run, rank)):
        found = row if row["event"] == event else found
    return found


def _available_bytes(live: TrainingRun) -> int:
    """Bytes that the device could still have given."""
    return _available_bytes_on_cuda(live.device) if live.device.type == "cuda" else memory_left()


def _available_bytes_on_cuda(device: Any = None) -> int:
    """On the one that this process uses, or on this one."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _bytes_in_use(live: TrainingRun, base: int) -> int:
    """Bytes that this process has now on its device, beyond what it had before the model was built."""
    if live.device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(live.device)
    from unipar.utils.procfs import anonymous_memory

    return anonymous_memory() - base
