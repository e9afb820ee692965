"""Pickled tasks, for code that is in no file (notebook, prompt), sent through a pipe that each rank inherits.

They are never sent over a socket or written to a file: unpickling runs code, so the data must come from the parent
process alone.
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
"""Bytes of the length written first: readers cannot wait for the end of the pipe, which forked processes keep open."""

_CHUNK_BYTES = 1 << 20

_IN_MEMORY_FILES = (io.BytesIO, io.StringIO)

_pickled_task = b""
"""Pickled task that this worker received from its parent."""


def is_without_file(thing: Any) -> bool:
    """Return whether a class or function is in no file: from a notebook, a prompt, `-c`, or a script from stdin."""
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
    """Return the name of a class or function, or its repr if it has none."""
    return getattr(thing, "__qualname__", "") or repr(thing)


def pickle_task(name: str, thing: Any) -> bytes:
    """Return `thing` pickled by value with all that it refers to; raise TaskError if that is not possible."""
    if find_spec("cloudpickle") is None:
        raise TaskError(
            f"{name} was defined in a prompt, a notebook or a -c command; sending it to other processes needs "
            "cloudpickle: pip install 'unipar[notebook]', or put it into a file and import it from there"
        )
    import cloudpickle  # pyright: ignore[reportMissingImports] - an extra

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportImplicitOverride] - the parent has no types
            if why := _why_not_picklable(obj):
                raise TypeError(f"it holds {why}")
            return super().reducer_override(obj)

    pickled = io.BytesIO()
    try:
        Pickler(pickled).dump(thing)
    except Exception as e:  # whatever __reduce__ and __getstate__ raise
        raise TaskError(
            f"{name} cannot be sent to other processes: {e}; create such objects in its methods, which each rank calls "
            "for itself, or put it into a file and import it from there"
        ) from e
    return pickled.getvalue()


def _why_not_picklable(thing: Any) -> str:
    """Return what the object is if it belongs to this process although cloudpickle would copy it, else ""."""
    if isinstance(thing, io.IOBase):
        return "" if isinstance(thing, _IN_MEMORY_FILES) or thing in (sys.stdout, sys.stderr) else "an open file"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
        return f"a tensor on {thing.device}"
    return ""


def unpickle_task() -> Any:
    """Return the task that this worker received from its parent."""
    assert _pickled_task, "this process received no task"
    import cloudpickle  # pyright: ignore[reportMissingImports] - an extra

    return cloudpickle.loads(_pickled_task)


def receive_task(fd: int) -> None:
    """Read the pickled task from the parent's pipe, in a worker."""
    global _pickled_task
    with os.fdopen(fd, "rb") as pipe:
        _pickled_task = pipe.read(int.from_bytes(pipe.read(_LENGTH_BYTES)))


def send_task(data: bytes, fds: Sequence[int]) -> None:
    """Write the pickled task to the workers' pipes and close them.

    A thread writes, because a pipe holds less than a task and workers read only once they have started.
    """
    threading.Thread(target=_write_to_pipes, args=(data, fds), name="send-task", daemon=True).start()


def _write_to_pipes(data: bytes, fds: Sequence[int]) -> None:
    message = memoryview(len(data).to_bytes(_LENGTH_BYTES) + data)
    for fd in fds:
        with suppress(BrokenPipeError), os.fdopen(fd, "wb", buffering=0) as pipe:  # the worker has ended
            at = 0
            while at < len(message):
                at += pipe.write(message[at : at + _CHUNK_BYTES]) or 0
