"""Durations in a config: a number of seconds, or text such as 90s, 30m, 3h50m, 2d."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _UNITS))


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as 3h50m means; raise ValueError if it is none."""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"{text!r} is no duration; write seconds as a number, or d, h, m and s, as in 30m or 3h50m")
    return sum(float(number) * unit for number, unit in zip(match.groups(), _UNITS.values(), strict=True) if number)


def _seconds(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=30 * 24 * 3600)]
"""Time in seconds, or text such as 30m; at most 30 days: timers of some libraries overflow beyond that."""
