"""JSON of checkpoints: limits, and values that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.checkpoint.format.strict_json import dump_strict_json, parse_strict_json
from unipar.errors import CheckpointError


def test_what_is_written_is_read() -> None:
    """Numbers of any size, texts of any alphabet, and floats to the last bit."""
    value = {"seed": 2**70, "λ": [0.1, -0.0, 1e-308, None, True], "nested": {"a": {"b": []}}}
    data = dump_strict_json(value, "state.json", largest=1000, deepest=4)
    assert parse_strict_json(data, "state.json", largest=1000, deepest=4) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1.0, float("nan")]}, "state.json: a[1] is nan, which JSON has no word for"),
        ({"a": {"b": float("inf")}}, "state.json: a.b is inf, which JSON has no word for"),
        ({"a": {1: 2}}, "state.json: the key 1 at a is not a string"),
        (
            {"a": {"b": [0, {1, 2}]}},
            "state.json: a.b[1] is of type set; JSON holds numbers, texts, true, false, null, lists and objects",
        ),
        ({"a": "\ud800"}, "state.json: a text at a is not valid Unicode"),
        ([[[[[1]]]]], "state.json: nested deeper than 4 levels"),
        ({"a": "x" * 1000}, "state.json: 1.0 KiB of JSON; at most 900 B are written"),
    ],
)
def test_what_cannot_be_read_is_not_written(value: Any, message: str) -> None:
    """The sentence names the place in the value."""
    with pytest.raises(CheckpointError) as caught:
        dump_strict_json(value, "state.json", largest=900, deepest=4)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x" * 901, "a: 901 B of JSON; at most 900 B are read"),
        (b'{"a": 1e999}', "a: a is inf, which JSON has no word for"),
        (b'{"a": "\\ud800"}', "a: a text at a is not valid Unicode"),
        (b"", "a: not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        (b'{"b": {"a": 1, "a": 1}}', "a: not valid JSON (the key 'a' stands there twice)"),
    ],
)
def test_what_is_not_plain_is_not_read(data: bytes, message: str) -> None:
    """Each with its reason."""
    with pytest.raises(CheckpointError) as caught:
        parse_strict_json(data, "a", largest=900, deepest=4)
    assert str(caught.value) == message


def test_what_needs_no_look_at_every_value() -> None:
    """Whole numbers without escapes, by their depth: brackets in texts do not count, an exponent needs a look."""
    plain = dump_strict_json({"a[": [{"b": [1, True, None]}]}, "x", largest=1000, deepest=9)
    for deepest in (0, 1, 2, 3):
        with pytest.raises(CheckpointError, match=f"^x: nested deeper than {deepest} levels$"):
            parse_strict_json(plain, "x", largest=1000, deepest=deepest)
    assert parse_strict_json(plain, "x", largest=1000, deepest=4) == {"a[": [{"b": [1, True, None]}]}
    for text in ("[1e999]", "[1E999]", "[-1.0e999]", f"[{'9' * 400}.0]"):
        with pytest.raises(CheckpointError, match=r"^x: \[0\] is -?inf, which JSON has no word for$"):
            parse_strict_json(text.encode(), "x", largest=1000, deepest=4)
    with pytest.raises(CheckpointError, match=r"^x: a text at \[0\] is not valid Unicode$"):
        parse_strict_json(b'["\\ud800"]', "x", largest=1000, deepest=4)
