"""Sizes and shares in a config: bytes as text such as 80GiB, and parts of a whole such as 5%."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_UNITS: Final = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)},
}


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as 80GiB means; raise ValueError if it is none."""
    number = text.rstrip("BKMGTPi ")
    try:
        size = float(number) * _UNITS[text[len(number) :].strip()]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no size; write a number and one of {', '.join(_UNITS)}, as in 80GiB") from None
    if not 0 < size < 2**60:
        raise ValueError(f"{text!r} is no size of a memory; write one above 0, as in 80GiB")
    return int(size)


def parse_fraction(text: str) -> float:
    """Return the part of a whole that a text such as 5% means; raise ValueError if it is none."""
    try:
        return float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        raise ValueError(f"{text!r} is no share; write per cent, or a fraction, as in 5% or 0.05") from None


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _fraction(value: Any) -> Any:
    return parse_fraction(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0, lt=2**60)]
"""Number of bytes, or text such as 80GiB."""

Fraction = Annotated[float, BeforeValidator(_fraction), Field(ge=0, lt=1)]
"""Part of a whole, from 0 to less than 1, or text such as 5%."""
