"""Sizes and shares in a config."""

from __future__ import annotations

import pytest

from unipar.config.sections.batch import Batch
from unipar.config.sections.size import parse_bytes, parse_fraction
from unipar.config.source import load_given_config
from unipar.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("700B", 700), ("1kB", None)]
)
def test_sizes(text: str, size: int | None) -> None:
    """Powers of two and of ten; a letter that is none is refused with an example."""
    if size is not None:
        assert parse_bytes(text) == size
        return
    with pytest.raises(ValueError, match="is no size") as e:
        parse_bytes(text)
    assert str(e.value) == (
        "'1kB' is no size; write a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, as in 80GiB"
    )


@pytest.mark.parametrize("text", ["80Gib", "80", "GiB", "80 GiB x"])
def test_sizes_that_are_none(text: str) -> None:
    """A unit is needed, as it is written."""
    with pytest.raises(ValueError, match="is no size; write a number and one of"):
        parse_bytes(text)


def test_a_size_of_nothing() -> None:
    """A memory has some bytes."""
    with pytest.raises(ValueError, match="is no size of a memory") as e:
        parse_bytes("0GiB")
    assert str(e.value) == "'0GiB' is no size of a memory; write one above 0, as in 80GiB"


def test_shares() -> None:
    """In per cent or as a fraction."""
    assert (parse_fraction("5%"), parse_fraction("0.1"), parse_fraction("0%")) == (0.05, 0.1, 0.0)
    with pytest.raises(ValueError, match="is no share") as e:
        parse_fraction("some")
    assert str(e.value) == "'some' is no share; write per cent, or a fraction, as in 5% or 0.05"


def test_in_a_config() -> None:
    """As text or as numbers; a share of all leaves nothing."""
    given = {"batch": {"total": 8, "micro": "auto", "memory": "64MiB", "headroom": "10%"}, "train": {"steps": 1}}
    batch = load_given_config(given, None).config.batch
    assert batch == Batch(total=8, micro="auto", memory=2**26, headroom=0.1)
    assert batch.limit_of(1000) == 900
    with pytest.raises(ConfigError, match=r"batch\.headroom: wanted a number of at least 0 and below 1, got .100%.$"):
        load_given_config({**given, "batch": {**given["batch"], "headroom": "100%"}}, None)
