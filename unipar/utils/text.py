"""Sizes in words, both ways; durations, counts, lists of names, suggestions ("did you mean") and config values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Final, cast


def format_duration(seconds: float) -> str:
    """Return a duration in words: 380 us, 4.2 ms, 210 ms, 3.1 s, 2 min 05 s."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 0.9995 or unit == "us":
            return f"{seconds * factor:.{1 if seconds * factor < 9.95 else 0}f} {unit}"
    raise AssertionError(seconds)


def format_clock(seconds: float) -> str:
    """Return seconds as a clock shows them: 90.4 as "1:30"."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_age(seconds: float) -> str:
    """Return an age in its largest unit: 40 s, 12 min, 3 h, 5 days."""
    for unit, length in (("days", 172800), ("h", 7200), ("min", 120)):
        if seconds >= length:
            return f"{seconds // {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_size(count: float) -> str:
    """Return a number of bytes as 900 B, 612 MiB, 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.{0 if unit == 'B' or count >= 9.95 else 1}f} {unit}"
        count /= 1024
    raise AssertionError(count)


SIZE_UNITS: Final = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)},
}
"""Bytes of each unit of a size in words."""


def short_dtype(dtype: object) -> str:
    """Return the name of one of torch's dtypes: bfloat16."""
    return str(dtype).removeprefix("torch.")


def parse_bytes(text: str) -> float:
    """Return the number of bytes that words such as 80GiB stand for; raise ValueError, with a sentence, if none."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?) *([A-Za-z]*)", text.strip())
    number, unit = match.groups() if match else ("", "")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"a size is a positive number and one of {', '.join(SIZE_UNITS)}: 80GiB") from None
    if unit not in SIZE_UNITS:
        likely = [u for u in SIZE_UNITS if u.lower() == unit.lower()]
        likely = likely or [u for u in ("GiB", "GB") if unit.lower() in ("", "g", "gi")]
        likely = likely or [u for u in SIZE_UNITS if unit and u[0].lower() == unit[0].lower()]
        near = f"; did you mean {join_with_or([number + u for u in likely])}?" if likely else ": 80GiB"
        raise ValueError(f"a size is a number and one of {', '.join(SIZE_UNITS)}{near}")
    if not 0 < value < float("inf"):
        raise ValueError("a size is positive: 80GiB")
    return value * SIZE_UNITS[unit]


_FLOP_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def flops_scale(numbers: Iterable[float]) -> tuple[float, str]:
    """Return the divisor with which the largest of these numbers of operations reads best, and its prefix."""
    most = max(numbers, default=0.0)
    return next(((size, prefix) for size, prefix in _FLOP_PREFIXES if most >= size), _FLOP_PREFIXES[-1])


def format_flops(number: float) -> str:
    """Return a number of operations: `1.73 GFLOP`."""
    scale, prefix = flops_scale([number])
    return f"{number / scale:.3g} {prefix}FLOP"


def format_number(value: float | None) -> str:
    """Return a number with four decimal places, or "not finite" for None (a run log's NaN or infinity)."""
    return "not finite" if value is None else f"{value:.4f}"


def format_rate(rate: float) -> str:
    """Return a number a second: 1,234, or 12.3 where it is small."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def count_of(count: int, what: str) -> str:
    """Return a count with its noun: 1 step, 2 steps, 2 strategies."""
    if count == 1:
        return f"1 {what}"
    return f"{count} {what.removesuffix('y')}ies" if what.endswith("gy") else f"{count} {what}s"


def first_few(names: Sequence[str], count: int | None = None, most: int = 3) -> str:
    """Return "a, b, c and 4 more": the first `most` names; `count` is the number of names if not all are given."""
    count = len(names) if count is None else count
    return ", ".join(names[:most]) + (f" and {count - most} more" if count > most else "")


def patterns_of(names: Iterable[str]) -> str:
    """Return "layers.*.up, layers.*.down": names of modules, each with * for its numbers, once."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def cut_middle(text: str, most: int) -> str:
    """Return the text, or its beginning and its end with "..." between them, in `most` characters."""
    if len(text) <= most:
        return text
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def cut_words(text: str, most: int) -> str:
    """Return the text with each word of more characters cut in its middle."""
    return re.sub(rf"[^\s,]{{{most + 1},}}", lambda word: cut_middle(word[0], most), text)


def join_with_or(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def join_with_and(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def closest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that is most like a misspelt word, or None if none is close."""
    return next(iter(difflib.get_close_matches(word, list(words), 1)), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean 'x'?", or "" if no known word is close."""
    words = list(words)
    likely = [w for w in words if w.startswith(word)][:2] if word else []
    if not likely and (near := closest(word, words)) is not None:
        likely = [near]
    return f"; did you mean {join_with_or([repr(w) for w in likely])}?" if likely else ""


def yaml_word(value: object) -> str:
    """Return a plain value as a config file has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_word, cast('tuple[object, ...]', value)))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def show_value(value: object) -> str:
    """Return a value as a config would write it, shortened to 60 characters."""
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
