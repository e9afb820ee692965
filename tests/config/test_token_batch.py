"""A batch that is counted in tokens: its sizes in a world, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from unipar.backend.offered_strategies import config_in_strategy
from unipar.config import BatchSizes, Config, Strategy
from unipar.config.sections.batch import Batch, TokenLimits
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError


def _config(**batch: Any) -> Config:
    return Config.model_validate({"batch": batch, "parallel": {"data": 2}, "train": {"steps": 1}})


@pytest.mark.parametrize(
    ("batch", "ranks", "sizes"),
    [
        ({"tokens": 60}, 4, BatchSizes(60, 15, 1, 4, TokenLimits(None, 1, None, packed=False))),
        ({"tokens": 60, "accumulate": 2}, 4, BatchSizes(60, 8, 2, 4, TokenLimits(None, 2, None, packed=False))),
        ({"tokens": 60, "micro": 8}, 4, BatchSizes(60, 8, 2, 4, TokenLimits(8, None, None, packed=False))),
        (
            {"tokens": 60, "micro": 8, "max_length": 8, "rows": "packed"},
            1,
            BatchSizes(60, 8, 8, 1, TokenLimits(8, None, 8, packed=True)),
        ),
    ],
)
def test_sizes_in_a_world(batch: dict[str, Any], ranks: int, sizes: BatchSizes) -> None:
    """The budget is that of the world; without `micro`, a rank's microbatches are counted."""
    settled = Batch.model_validate(batch).settle(ranks)
    assert settled == sizes
    assert (settled.unit, Batch.model_validate(batch).size) == ("tokens", 60)


def test_a_batch_of_samples_is_counted_in_samples() -> None:
    """As before: `size` is the total, where it is given."""
    assert (Batch(total=8).settle(2).unit, Batch(total=8).size, Batch(micro=2, accumulate=2).size) == (
        "samples",
        8,
        None,
    )


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"tokens": 60, "total": 8}, "tokens (60) and total (8) both say how large a step is; leave one out"),
        (
            {"tokens": 60, "micro": "auto"},
            "micro: auto counts samples, and tokens counts tokens; give micro the padded tokens of one forward pass",
        ),
        (
            {"tokens": 60, "micro": 8, "accumulate": 2},
            "under tokens, micro (8) and accumulate (2) both say how many microbatches a step has; leave one out",
        ),
        (
            {"tokens": 60, "max_length": 64},
            "tokens (60) is below max_length (64), so that it could not hold the longest sample; raise tokens, or "
            "lower max_length",
        ),
        (
            {"tokens": 60, "max_length": 32, "micro": 16},
            "micro (16) is below max_length (32), so that it could not hold the longest sample; raise micro, or lower "
            "max_length",
        ),
        ({"total": 8, "max_length": 4}, "max_length: 4 has no effect without tokens; leave it out, or give tokens"),
        (
            {"total": 8, "memory_check": True},
            "memory_check: true has no effect without tokens: microbatches of samples are of one size; leave it out",
        ),
        ({"total": 8, "rows": "packed"}, "rows: packed has no effect without tokens; leave it out, or give tokens"),
    ],
)
def test_what_contradicts_a_budget(batch: dict[str, Any], sentence: str) -> None:
    """Each with the keys, the numbers and the way out."""
    with pytest.raises(ValidationError) as e:
        Batch.model_validate(batch)
    assert sentence in str(e.value)


def test_what_counts_samples_refuses_tokens() -> None:
    """The sentence says what needs samples, and how to give them."""
    Batch(total=8).require_samples("a script reads samples")
    with pytest.raises(ConfigError) as e:
        Batch(tokens=64).require_samples("a script reads samples")
    assert str(e.value) == (
        "batch.tokens: 64: a script reads samples; say how many samples a step has instead, as in --set "
        "'batch={total: 32, micro: 4}'"
    )


@pytest.mark.parametrize(
    ("batch", "accumulate"),
    [({"tokens": 60}, 2), ({"tokens": 60, "accumulate": 3}, 6), ({"tokens": 60, "micro": 8}, None)],
)
def test_one_process_has_as_many_microbatches(batch: dict[str, Any], accumulate: int | None) -> None:
    """Those of two ranks, one after another; a limit of padded tokens stays."""
    one = config_in_strategy(_config(**batch), Strategy("single"))
    assert (one.batch.tokens, one.batch.accumulate) == (60, accumulate)
    assert one.batch.on_other_ranks(1, 2).accumulate == batch.get("accumulate", 1 if accumulate else None)


def test_sizes_are_read_back() -> None:
    """launch.json holds them for the ranks."""
    settled = SettledConfig.of(_config(tokens=60, micro=8), Strategy("native"), 2, "cpu")
    again = SettledConfig.from_json(settled.config.model_dump_json(), settled.to_json())
    assert again.sizes == settled.sizes
