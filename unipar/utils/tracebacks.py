"""Frames of the user's own code in tracebacks: those of no installed package, of the standard library or of unipar."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from unipar.utils.files import is_in_folders, is_library_file, relative_path

_FRAME: Final = re.compile(r'^\s*File "(?P<file>[^<"][^"]*)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def is_user_file(file: str) -> bool:
    """Return whether a file is the user's own: of no library, and not of unipar or a package of its backends."""
    if file.startswith("<") or is_library_file(file):
        return False
    packages = (module for name, module in list(sys.modules.items()) if name == "unipar" or name.startswith("unipar_"))
    folders = {os.path.realpath(path) for module in packages for path in getattr(module, "__path__", ())}
    return not is_in_folders(file, folders)


def user_place(text: str) -> str:
    """Return the innermost place in the user's code of a printed traceback, as "train.py:41, in loss"; "" if none.

    The text of an error from a process of a DataLoader ends with the traceback from there, which then counts.
    """
    places = [match for match in _FRAME.finditer(text) if is_user_file(match["file"])]
    if not places:
        return ""
    last = places[-1]
    return f"{relative_path(Path(last['file']))}:{last['line']}, in {last['function']}"


def user_place_of(error: BaseException) -> str:
    """Return the same for an error."""
    return user_place("".join(traceback.format_exception(error)))


def from_user_code(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames above the user's code; all of it if it has none of the user's."""
    at = frames
    while at is not None and not is_user_file(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at or frames
