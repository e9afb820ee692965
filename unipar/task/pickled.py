"""What has no file travels by value: a task from a notebook or a prompt, pickled, over a pipe that each rank inherits.

Never over a socket and never by a file: unpickling runs what is in it, so it goes from this process to its own workers
alone.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unipar.errors import TaskError

_LENGTH_BYTES = 8
"""Bytes that say how many follow: whoever forks while we write keeps the pipe open behind us."""

_CHUNK_BYTES = 1 << 20

_IN_MEMORY_FILES = (io.BytesIO, io.StringIO)

_pickled_task = b""
"""What this worker's parent gave it."""


def is_without_file(thing: Any) -> bool:
    """Whether it was typed in where no file holds it: a notebook, a prompt, `-c`, or a script from stdin."""
    if getattr(thing, "__module__", "") != "__main__":
        return False
    main: Any = sys.modules["__main__"]
    inside = [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]
    codes = [code for x in inside if (code := getattr(x, "__code__", None)) is not None]
    if codes:
        return codes[0].co_filename.startswith("<") or not Path(getattr(main, "__file__", None) or "<").exists()
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not Path(file).exists())


def describe_name(thing: Any) -> str:
    return getattr(thing, "__qualname__", "") or repr(thing)


def pickle_task(name: str, thing: Any) -> bytes:
    """`thing` with all that it holds; TaskError, before anything was started, where it cannot be taken along."""
    if find_spec("cloudpickle") is None:
        raise TaskError(
            f"{name} was defined in a prompt, a notebook or a -c command; to take it to other processes cloudpickle is "
            "needed: pip install 'unipar[notebook]', or put it into a file and import it from there"
        )
    import cloudpickle  # pyright: ignore[reportMissingImports] - an extra

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportImplicitOverride] - the parent has no types
            if why := _why_not_picklable(obj):
                raise TypeError(f"it holds {why}")
            return super().reducer_override(obj)

    made = io.BytesIO()
    try:
        Pickler(made).dump(thing)
    except Exception as e:  # whatever __reduce__ and __getstate__ raise
        raise TaskError(
            f"{name} cannot travel to other processes: {e}; let its methods make such a thing, as each rank calls them "
            "for itself, or put it into a file and import it from there"
        ) from e
    return made.getvalue()


def _why_not_picklable(thing: Any) -> str:
    """What is this process's own, and what cloudpickle would copy all the same; empty for the rest."""
    if isinstance(thing, io.IOBase):
        return "" if isinstance(thing, _IN_MEMORY_FILES) or thing in (sys.stdout, sys.stderr) else "an open file"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
        return f"a tensor on {thing.device}"
    return ""


def unpickle_task() -> Any:
    """In a worker: what its parent packed."""
    assert _pickled_task, "nothing was handed to this process"
    import cloudpickle  # pyright: ignore[reportMissingImports] - an extra

    return cloudpickle.loads(_pickled_task)


def receive_task(fd: int) -> None:
    """In a worker: read all of it."""
    global _pickled_task
    with os.fdopen(fd, "rb") as pipe:
        _pickled_task = pipe.read(int.from_bytes(pipe.read(_LENGTH_BYTES)))


def send_task(data: bytes, fds: Sequence[int]) -> None:
    """To workers that have only just begun; closes the pipes. A pipe holds little, so a thread does it."""
    threading.Thread(target=_write_to_pipes, args=(data, fds), name="parcel", daemon=True).start()


def _write_to_pipes(data: bytes, fds: Sequence[int]) -> None:
    whole = memoryview(len(data).to_bytes(_LENGTH_BYTES) + data)
    for fd in fds:
        with suppress(BrokenPipeError), os.fdopen(fd, "wb", buffering=0) as pipe:  # a worker that is gone needs nothing
            at = 0
            while at < len(whole):
                at += pipe.write(whole[at : at + _CHUNK_BYTES]) or 0
