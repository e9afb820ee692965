"""Sizes and shares in a config."""

from __future__ import annotations

import pytest

from unipar.config.config_source import load_given_config
from unipar.config.sections.batch import Batch
from unipar.config.sections.size import parse_fraction
from unipar.errors import ConfigError
from unipar.utils.text import parse_bytes

UNITS = "one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("700B", 700)]
)
def test_sizes(text: str, size: int) -> None:
    """Powers of two and of ten."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1kB", f"a size is a number and {UNITS}; did you mean 1KB?"),
        ("80Gib", f"a size is a number and {UNITS}; did you mean 80GiB?"),
        ("80", f"a size is a number and {UNITS}; did you mean 80GiB or 80GB?"),
        ("GiB", f"a size is a positive number and {UNITS}: 80GiB"),
        ("80 GiB x", f"a size is a positive number and {UNITS}: 80GiB"),
        ("0GiB", "a size is positive: 80GiB"),
    ],
)
def test_sizes_that_are_none(text: str, sentence: str) -> None:
    """A unit is needed, as it is written; a memory has some bytes."""
    with pytest.raises(ValueError, match=r"^a size is") as e:
        parse_bytes(text)
    assert str(e.value) == sentence


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
