"""Sizes and shares in a config: bytes as text such as 80GiB, and parts of a whole such as 5%."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from unipar.utils.text import parse_bytes


def parse_fraction(text: str) -> float:
    """Return the part of a whole that a text such as 5% means; raise ValueError if it is none."""
    try:
        return float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        raise ValueError(f"{text!r} is no share; write per cent, or a fraction, as in 5% or 0.05") from None


def _bytes(value: Any) -> Any:
    return int(parse_bytes(value)) if isinstance(value, str) else value


def _fraction(value: Any) -> Any:
    return parse_fraction(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0, lt=2**60)]
"""Number of bytes, or text such as 80GiB."""

Fraction = Annotated[float, BeforeValidator(_fraction), Field(ge=0, lt=1)]
"""Part of a whole, from 0 to less than 1, or text such as 5%."""
