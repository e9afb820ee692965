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
from unipar.planning.estimate import fitting, kept
from unipar.run_folder.heartbeat import At
from unipar.run_folder.layout import ledger_of
from unipar.run_folder.ledger import Ledger
from unipar.utils.procfs import memory_left
from unipar.utils.text import format_size

if TYPE_CHECKING:
    from unipar.training.run import TrainingRun


_SIGNS = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory", "Unable to allocate")
"""What torch, CUDA, C++, the system and numpy say."""


_ASKED = re.compile(r"(?i)(?:allocate|allocating)\D{0,20}?(\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def ran_out(error: BaseException) -> bool:
    """Whether that is what it says, or what it comes from."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return not isinstance(error, UniparError)
    if isinstance(error, UniparError):
        return False
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    return said or (error.__cause__ is not None and ran_out(error.__cause__))


def asked(error: BaseException) -> int | None:
    """The bytes that could not be had, where the error tells."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


@contextmanager
def explaining(run: Path, rank: int, live: TrainingRun | None = None) -> Generator[None]:
    """What runs out of memory in the body leaves it as OutOfMemory; `live` is not there while it is built."""
    try:
        yield
    except BaseException as e:
        said = explained(e, run, rank, live)
        if said is e:
            raise
        raise said from e


def explained(error: BaseException, run: Path, rank: int, live: TrainingRun | None = None) -> BaseException:
    """The same as OutOfMemory where it is that; any other as it is."""
    if not ran_out(error):
        return error
    try:
        made = OutOfMemory(_sentence(error, run, rank, live))
    except Exception as e:  # whatever it is: the error itself matters more
        error.add_note(f"unipar could not say more of it: {type(e).__name__}: {e}")
        return error
    made.__cause__ = error
    return made


def _sentence(error: BaseException, run: Path, rank: int, live: TrainingRun | None) -> str:
    at = At.of(run, rank) or At("start", 0)
    wanted = asked(error)
    device = live.device.type if live is not None else "cpu"
    on_cuda = live is None and "CUDA" in str(error)  # nothing is built: the error itself tells whose memory it was
    left = _left(live) if live is not None else _left_on_cuda() if on_cuda else memory_left()
    said = f"rank {rank} ran out of memory {at}"
    if wanted is not None:
        said += f": {format_size(wanted)} more were asked for, about {format_size(left)} were left"
    if live is None:
        settled = read_settled(run)
        config, sizes, parameters, parts, beside = settled.config, settled.sizes, 0, {}, None
    else:
        from unipar.memory.recording.holdings import held

        start = _last(run, rank, "start")
        config, sizes, parameters = live.config, live.sizes, int(start["parameters"])
        parts = held((part.engine for part in live.parts.values()), device)
        beside = max(0, _taken(live, int(start["resident"])) - sum(parts.values()))
    lack = None if wanted is None else max(1, wanted - left)
    moving = None if beside is None else beside + (wanted or 0)
    more = [most(parts, beside), fitting(config, sizes, parameters, at.phase, moving=moving, lack=lack)]
    return "; ".join([said, *filter(None, more)])


def most(parts: Mapping[Any, int], beside: int | None) -> str:
    """What held the most, and the rest in order."""
    named = [*parts.items(), *([("activations and all else", beside)] if beside else [])]
    ranked = sorted(((name, number) for name, number in named if number), key=lambda item: -item[1])
    if not ranked:
        return ""
    (first, number), *others = ranked
    about = "about " if beside and first not in parts else ""
    rest = ", ".join(f"{name} {format_size(number)}" for name, number in others)
    return f"the most was held by {first}, {about}{format_size(number)}" + (f" ({rest})" if rest else "")


def of_the_dead(run: Path, rank: int) -> str:
    """What can be told of a rank that could not say why it ended: nothing, if it did not come so far."""
    with suppress(FileNotFoundError):
        settled, at, start = read_settled(run), At.of(run, rank), _last(run, rank, "start")
        if at is None or not start:
            return ""
        parameters = int(start["parameters"])
        said = _counted(run, rank) or f"by an estimate {most(kept(settled.config, settled.ranks, parameters), None)}"
        return f"{said}; {fitting(settled.config, settled.sizes, parameters, at.phase)}"
    return ""


def _counted(run: Path, rank: int) -> str:
    """What held the most when its memory was last watched; empty: it never was."""
    step = _last(run, rank, "step")
    if step.get("memory"):
        fullest = max(step["memory"], key=lambda phase: phase["peak"])
        return f"in step {step['step']} {most(fullest['held'], None)}"
    with suppress(ReportError):
        fullest = read_account(run, rank).peak
        return f"in the {fullest.name} of a watched step {most(fullest.held, None)}"
    return ""


def _last(run: Path, rank: int, event: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    for row in Ledger.read(ledger_of(run, rank)):
        found = row if row["event"] == event else found
    return found


def _left(live: TrainingRun) -> int:
    """Bytes that the device could still have given."""
    return _left_on_cuda(live.device) if live.device.type == "cuda" else memory_left()


def _left_on_cuda(device: Any = None) -> int:
    """On the one that this process uses, or on this one."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _taken(live: TrainingRun, base: int) -> int:
    """Bytes that this process has now on its device, beyond what it had before the model was built."""
    if live.device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(live.device)
    from unipar.utils.procfs import anonymous_memory

    return anonymous_memory() - base
