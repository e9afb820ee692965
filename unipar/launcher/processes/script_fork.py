"""Fork of the process that runs the user's script, made into one that has its libraries and nothing else of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, final

from unipar.utils.files import is_library_file

_kept: list[object] = []
"""The script's modules and streams in a fork of it: kept, because their ends could close or remove what they hold."""


def why_not_fork() -> str:
    """Return why a fork of this process would not be like a new process that has imported the same libraries; or "".

    The script may have set what training depends on, or may hold what a fork must not share.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported"
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is None or is_library_file(main):
        return "no script of the user's is running"
    if threading.current_thread() is not threading.main_thread():
        return "it is not the main thread"
    device: Any = torch.get_device_module()
    if device is not torch.cpu and getattr(device, "is_initialized", lambda: False)():  # mps does not say
        return "an accelerator is in use"
    if torch.distributed.is_initialized():
        return "a process group is in use"
    if (processes := sys.modules.get("multiprocessing")) is not None and processes.active_children():
        return "it has started processes"
    settings = (
        torch.get_default_dtype() is torch.float32,
        torch.get_default_device().type == "cpu",
        torch.is_grad_enabled(),
        not torch.are_deterministic_algorithms_enabled(),
    )
    return "" if all(settings) else "settings of torch were changed"


@final
class ForkOfThisProcess:
    """Child process that was forked from this one, with the methods of `Popen` that its owner needs."""

    def __init__(self, main: Callable[[], object], environment: Mapping[str, str]) -> None:
        """Fork; the child forgets the script, has the variables of `environment` besides its own, and calls `main`."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: `threads_left_behind` looks itself
            self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_new_process(environment)
                main()
            finally:
                os._exit(1)
        self.threads_left_behind = len(os.listdir("/proc/self/task")) > 1
        """Whether this process has threads that the fork lacks. (OpenBLAS ends its own at a fork, so they are gone.)"""

        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait until it has ended; return the exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _become_new_process(environment: Mapping[str, str]) -> None:
    """Give this fork its own session, streams, signal handlers and `__main__`; forget the script and its modules."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.update(environment)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    _kept.extend([sys.stdin, sys.stdout, sys.stderr])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until this process ends
    for name, errors in (("stdout", "strict"), ("stderr", "backslashreplace")):
        stream = open(1 if name == "stdout" else 2, "w", 1, "utf-8", errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _forget_script()
    torch: Any = sys.modules["torch"]
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(torch.Generator().initial_seed())  # the script may have drawn from it


def _forget_script() -> None:
    """Remove the script and the modules beside it: a worker imports them again, up to the launch."""
    main = sys.modules["__main__"]
    folder = str(Path(str(main.__file__)).parent.resolve())
    if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == folder:
        del sys.path[0]
    sys.argv[:] = [__file__]
    of_user = {name for name in {name.partition(".")[0] for name in sys.modules} if _is_of_user(name)}
    _kept.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in of_user)
    sys.modules["__main__"] = ModuleType("__main__")


def _is_of_user(name: str) -> bool:
    """Return whether a top-level module is the script's own; compiled modules cannot be imported twice."""
    if name.startswith("unipar"):
        return False
    module = sys.modules.get(name)
    paths = [*getattr(module, "__path__", []), getattr(module, "__file__", None) or ""]
    file = next((str(path) for path in paths if path), "")
    return bool(file) and not file.endswith(tuple(EXTENSION_SUFFIXES)) and not is_library_file(file)
