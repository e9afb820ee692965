"""Frames of a script: the value of one of its variables, which the user has named."""

from __future__ import annotations

from types import FrameType
from typing import Any


def find_variable(frame: FrameType | None, file: str, name: str) -> float | None:
    """Return the value of a variable in the nearest caller that is in this file, as a number; None if there is none."""
    while frame is not None:
        code_file = frame.f_code.co_filename
        if code_file == file or code_file.endswith(f"/{file}"):
            value: Any = frame.f_locals.get(name, frame.f_globals.get(name))
            if value is not None:
                return float(value)
        frame = frame.f_back
    return None
