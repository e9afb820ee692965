"""`python SCRIPT`, `python -m MODULE` or `python -c CODE` in a fork, whose workers are forks of the same servers.

All libraries are imported already, which is all that it has beyond a new interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path

from tests.support import forks
from unipar.distributed.place import Place


def begin(place: Place, run: Path, control: socket.socket | None) -> None:
    """Be the command in `RUN/command.json`: its words, folder, environment and output; end with its exit code."""
    told = json.loads((run / "command.json").read_text("utf-8"))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(run / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(told["environment"])
    tempfile.tempdir = None
    os.chdir(told["folder"])
    forks.find_modules_as_new_interpreters_do()
    assert control is not None
    forks.LENT.append(({}, forks.server_of(control, told["plain"])))
    if place.listener is not None:
        metered = forks.server_of(socket.socket(fileno=place.listener), told["metered"])
        forks.LENT.append((forks.metered_environment(), metered))
    with forks.Forks(forks.LENT).instead():
        code = _run(told["words"])
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - os._exit leaves them out
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(words: Sequence[str]) -> int:
    """Run the command, print an error as Python does, and return the exit code."""
    sys.orig_argv = [sys.executable, *words]
    try:
        _run_main(*words)
    except SystemExit as e:
        if isinstance(e.code, str):
            sys.stderr.write(f"{e.code}\n")
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0


def _run_file(path: str) -> None:
    """Run a file as `__main__`, whose objects live on after it."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))


def _run_main(first: str, *rest: str) -> None:
    if first == "-m":
        sys.argv = list(rest)
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        _run_file(first)  # what it makes lives to the end: torch may hang where DDP is freed without a group
