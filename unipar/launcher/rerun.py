"""Command line of the running script, so that workers can run the same script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from unipar.errors import TaskError

_FLAGS_WITH_VALUE = "WX"


def find_script_command(words: Sequence[str] | None = None) -> list[str]:
    """Return ["script", path, argument...] or ["module", name, argument...] of this process."""
    rest = list(sys.orig_argv if words is None else words)[1:]
    if hasattr(sys, "ps1"):  # a notebook's kernel is run by `python -m`, and is not the user's script
        raise _no_script_error("a prompt or a notebook")
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag.startswith("--"):
            if flag == "--check-hash-based-pycs":
                rest.pop(0)
            continue
        for i, letter in enumerate(flag[1:], 1):
            value = flag[i + 1 :]
            if letter == "m":
                return ["module", value or rest.pop(0), *rest]
            if letter == "c":
                raise _no_script_error("a -c command")
            if letter in _FLAGS_WITH_VALUE:
                if not value:
                    rest.pop(0)
                break
    if not rest or rest[0] == "-":
        raise _no_script_error("a prompt or a notebook")
    if not Path(rest[0]).is_file():
        raise _no_script_error(f"{rest[0]}, which is not a file")
    return ["script", rest[0], *rest[1:]]


def _no_script_error(where: str) -> TaskError:
    return TaskError(
        f"join runs the script that calls it again in each rank, and this is {where}: put the loop into a file, "
        "or use launch() with a task"
    )
