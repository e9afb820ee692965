"""Running a command with every Python process of it observed, and what is said when it has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Final

from unipar.errors import ConfigError
from unipar.memory.sources.malloc_build import MeterUnavailable, build_meter, preload_environment
from unipar.observing.settings import SETTINGS_VARIABLE, ObserveSettings

_OTHER_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")
"""Parts of names of preloaded libraries that replace malloc, and that the meter would replace."""

_FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to this process alone that are passed on; Ctrl-C reaches the command by the terminal."""


def observed_environment(settings: ObserveSettings, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a command's Python processes observe themselves."""
    inject = str(files("unipar.observing.process").joinpath("inject"))
    before = environ.get("PYTHONPATH")
    changed = {
        SETTINGS_VARIABLE: settings.model_dump_json(),
        "PYTHONPATH": inject if not before else f"{inject}{os.pathsep}{before}",
    }
    return {**environ, **changed, **_meter_environment(settings, environ)}


def _meter_environment(settings: ObserveSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that preloads the meter, unless another allocator is preloaded."""
    preloaded = environ.get("LD_PRELOAD", "")
    if not settings.memory or any(name in preloaded for name in _OTHER_ALLOCATORS):
        return {}
    try:
        return {"LD_PRELOAD": preload_environment(build_meter())["LD_PRELOAD"]}
    except MeterUnavailable:
        return {}


def run_observed(command: Sequence[str], settings: ObserveSettings) -> int:
    """Run a command and return its exit code, below 0 for a signal; what it prints and reads is its own."""
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(f"observe: {command[0]} is not a program on PATH; give the command as you type it, after --")
    with (
        subprocess.Popen([path, *command[1:]], env=observed_environment(settings)) as process,
        _passing_on_signals(process),
    ):
        return _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command has had it from the terminal, too, and ends as it likes
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a further one must not end what is said after its end


@contextmanager
def _passing_on_signals(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Context manager: signals that this process gets go to the command; further ones after its end are ignored."""
    passed: set[int] = set()

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.add(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if number in passed else handler)


def end_like(code: int) -> None:
    """End this process as the command has ended: by its signal, or with its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        number = signal.Signals(-code)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(code)


def prepare_folder(folder: Path, *, overwrite: bool) -> Path:
    """Return the folder of the results, made and empty; raise ConfigError if it holds anything else."""
    folder = folder.absolute()
    if folder.exists():
        entries = list(folder.iterdir()) if folder.is_dir() else []
        if not folder.is_dir() or (entries and not overwrite):
            raise ConfigError(f"{folder} exists: give --overwrite, or another folder by --out DIR")
        foreign = [entry.name for entry in entries if not _is_ours(entry)]
        if foreign:
            raise ConfigError(
                f"{folder} holds {foreign[0]}, which `unipar observe` did not write, so it is not replaced: give "
                "another folder by --out DIR"
            )
        for entry in entries:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)  # another machine that shares the folder may have removed it
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_ours(entry: Path) -> bool:
    if entry.name == "__pycache__":  # beside the draft of a task that was imported
        return not entry.is_symlink()
    return entry.is_file() and (
        entry.name in ("observed.json", "report.html", "task.py", "task.yaml", "unipar.schema.json")
        or (entry.name.startswith("rank-") and entry.name.endswith((".jsonl", ".observed.json", ".memory.json")))
    )


def why_nothing(command: Sequence[str]) -> str:
    """Return why no process of a command was observed, as far as its words tell."""
    isolated = next((word for word in command[1:] if word in ("-I", "-E", "-IE", "-EI")), None)
    if isolated is not None:
        return (
            f"{isolated} makes Python ignore PYTHONPATH, through which processes are observed: leave it out, or start "
            "the script without it"
        )
    return (
        "none of its processes took a step of an optimizer of torch in a Python that could be observed: `python -I`, "
        "`env -i`, a container, a process of another user or on another machine does not get the environment; "
        "mpirun needs -x UNIPAR_OBSERVE -x PYTHONPATH -x LD_PRELOAD"
    )
