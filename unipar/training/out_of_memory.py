"""Out-of-memory errors: recognition, and a sentence that says what used the memory and what would fit."""

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
from unipar.planning.estimate import BLOCK_SIZES, ModelSize, estimate_kept_bytes, suggest_what_fits
from unipar.run_folder.heartbeat import LastPhase
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.procfs import OomKillCount, anonymous_memory, count_oom_kills, memory_left, memory_limit_bytes
from unipar.utils.text import format_size

if TYPE_CHECKING:
    from unipar.training.training_run import TrainingRun


_OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "Unable to allocate",
)
"""Phrases in out-of-memory errors of torch, CUDA, C++, the system and numpy."""


_REQUESTED_SIZE = re.compile(r"(?i)(?:allocate|allocating)\D{0,20}?(\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)")


_BYTES_PER_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return not isinstance(error, UniparError)
    if isinstance(error, UniparError):
        return False
    matches = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES)
    return matches or (error.__cause__ is not None and is_out_of_memory(error.__cause__))


def mentions_out_of_memory(text: str) -> bool:
    """Return whether a text, such as a log, says that memory ran out."""
    return "probably out of memory" in text or any(phrase in text for phrase in _OUT_OF_MEMORY_PHRASES)


def requested_bytes(error: BaseException) -> int | None:
    """Return the number of bytes that could not be allocated, if the error's text has it."""
    match = _REQUESTED_SIZE.search(str(error))
    return int(float(match[1]) * _BYTES_PER_UNIT[match[2]]) if match else None


@contextmanager
def explain_out_of_memory(run: Path, rank: int, live: TrainingRun | None = None) -> Generator[None]:
    """Context manager: turn errors of the body that mean out of memory into OutOfMemory.

    `live` is the run in training; None while it is built.
    """
    try:
        yield
    except BaseException as e:
        explained = as_out_of_memory(e, run, rank, live)
        if explained is e:
            raise
        raise explained from e


def as_out_of_memory(error: BaseException, run: Path, rank: int, live: TrainingRun | None = None) -> BaseException:
    """Return OutOfMemory with `error` as its cause if `error` means that; otherwise `error` itself."""
    if not is_out_of_memory(error):
        return error
    try:
        explained = OutOfMemory(_out_of_memory_sentence(error, run, rank, live))
    except Exception as e:  # an error in the explanation must not hide the original one
        error.add_note(f"unipar could not explain this error: {type(e).__name__}: {e}")
        return error
    explained.__cause__ = error
    return explained


def _out_of_memory_sentence(error: BaseException, run: Path, rank: int, live: TrainingRun | None) -> str:
    at = LastPhase.of(run, rank) or LastPhase("start", 0)
    wanted = requested_bytes(error)
    settled = read_settled(run)
    device = settled.device if live is not None or type(error).__name__ == "OutOfMemoryError" else "cpu"  # torch's own
    left = _available_bytes(device)
    sentence = f"rank {rank} ran out of memory {at}"
    if wanted is not None:
        sentence += f": {format_size(wanted)} more were requested, about {format_size(left)} were available"
    if live is None:
        config, sizes, model, parts, other = settled.config, settled.sizes, ModelSize(0), {}, None
    else:
        from unipar.memory.recording.held_bytes import bytes_held_by

        start = _last_event(run, rank, "start")
        config, sizes, model = live.config, live.sizes, _model_size(start)
        parts = bytes_held_by((part.engine for part in live.parts.values()), live.device.type)
        other = max(0, _bytes_in_use(live, int(start["resident"])) - sum(parts.values()))
    lack = None if wanted is None else max(1, wanted - left)
    moving = None if other is None else other + (wanted or 0)
    more = [
        describe_largest_holders(parts, other),
        suggest_what_fits(config, sizes, model, at.phase, moving=moving, lack=lack),
    ]
    return "; ".join([sentence, *filter(None, more)])


def describe_largest_holders(parts: Mapping[Any, int], other: int | None) -> str:
    """Return a phrase with the category that held most memory, and all others in order of size."""
    named = [*parts.items(), *([("activations and everything else", other)] if other else [])]
    ranked = sorted(((name, number) for name, number in named if number), key=lambda item: -item[1])
    if not ranked:
        return ""
    (first, number), *others = ranked
    about = "about " if other and first not in parts else ""
    rest = ", ".join(f"{name} {format_size(number)}" for name, number in others)
    return f"the largest part was {first}, {about}{format_size(number)}" + (f" ({rest})" if rest else "")


KEPT_SHARE_OF_MEMORY = 0.5
"""Share of the memory from which what ranks keep between steps is a reason to suspect that memory ran out.

Activations, buffers and temporary memory come on top, often as much again.
"""


def why_memory_ran_out(run: Path, rank: int, before: OomKillCount | None) -> str:
    """Return the reason to believe that a rank killed by SIGKILL was out of memory; "" if there is none.

    `before` is the kernel's count when the ranks started.
    """
    now = count_oom_kills()
    number = now.number - before.number if now is not None and before is not None and now.where == before.where else 0
    if now is not None and number > 0:
        killed = "a process" if number == 1 else f"{number} processes"
        return f"the kernel killed {killed} for lack of memory {now.where} since the start (see dmesg)"
    with suppress(FileNotFoundError):
        settled, start = read_settled(run), _last_event(run, rank, "start")
        if not start or settled.device != "cpu":
            return ""
        kept, has = settled.ranks * _kept_by_rank(run, rank, start), memory_limit_bytes()
        if kept >= KEPT_SHARE_OF_MEMORY * has:
            ranks = "the rank keeps" if settled.ranks == 1 else f"{settled.ranks} ranks keep"
            logs = "dmesg" if now is None else "the log of systemd-oomd, earlyoom or the scheduler"
            return f"by an estimate {ranks} {format_size(kept)} or more of {format_size(has)} (see {logs})"
    return ""


def _kept_by_rank(run: Path, rank: int, start: Mapping[str, Any]) -> int:
    """Return the bytes that a rank keeps at least: before the model was built, and by estimate or record since then."""
    settled = read_settled(run)
    estimated = sum(estimate_kept_bytes(settled.config, settled.ranks, _model_size(start)).values())
    recorded = max((phase["peak"] for phase in _last_event(run, rank, "step").get("memory") or ()), default=0)
    return int(start["resident"]) + max(estimated, recorded)


def describe_killed_rank(run: Path, rank: int) -> str:
    """Return a sentence on the memory of a rank that was killed, and what would need less; "" if it never started."""
    with suppress(FileNotFoundError):
        settled, at, start = read_settled(run), LastPhase.of(run, rank), _last_event(run, rank, "start")
        if at is None or not start:
            return ""
        model = _model_size(start)
        held = _describe_recorded_memory(run, rank)
        if not held:
            kept = estimate_kept_bytes(settled.config, settled.ranks, model)
            held = f"by an estimate {describe_largest_holders(kept, None)}"
        return f"{held}; {suggest_what_fits(settled.config, settled.sizes, model, at.phase)}"
    return ""


def _describe_recorded_memory(run: Path, rank: int) -> str:
    """Return a phrase on the memory that was recorded last; "" if none was."""
    step = _last_event(run, rank, "step")
    if step.get("memory"):
        peak = max(step["memory"], key=lambda phase: phase["peak"])
        return f"in step {step['step']} {describe_largest_holders(peak['held'], None)}"
    with suppress(ReportError):
        peak = read_account(run, rank).peak
        return f"in the {peak.name} of a recorded step {describe_largest_holders(peak.held, None)}"
    return ""


def _model_size(start: Mapping[str, Any]) -> ModelSize:
    """Return the size of the model from the run log's first event; numbers by block are there if axes split blocks."""
    return ModelSize(int(start["parameters"]), **{key: int(start[key]) for key in BLOCK_SIZES if key in start})


def _last_event(run: Path, rank: int, event: str) -> Mapping[str, Any]:
    last: Mapping[str, Any] = {}
    for row in RunLog.read(run_log_path(run, rank)):
        last = row if row["event"] == event else last
    return last


def _available_bytes(device: str) -> int:
    """Return the bytes that this process can still allocate on a device; on the CPU within a limit of the meter."""
    from unipar.memory.sources.malloc_limit import allocations_left

    if device != "cpu":
        import torch

        from unipar.distributed.device import available_bytes

        return available_bytes(torch.device(device))

    limited = allocations_left()
    return memory_left() if limited is None else min(limited, memory_left())


def _bytes_in_use(live: TrainingRun, base: int) -> int:
    """Return the bytes of this process on its device now; on the CPU, beyond those before the model was built."""
    if live.device.type != "cpu":
        from unipar.distributed.device import bytes_allocated

        return bytes_allocated(live.device)
    return anonymous_memory() - base
