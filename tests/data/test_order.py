"""Order of samples over epochs, and where a run goes on in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from unipar.data.order import DataPosition, SampleOrder
from unipar.errors import ConfigError


def test_batches_of_another_size_go_on_where_the_run_stopped() -> None:
    """After 3 batches of 4 of 22 samples, batches of 6 read the other 10 samples once, then whole epochs."""
    old = SampleOrder(22, 4, 7, shuffle=True, last_batch="keep")
    new = replace(old, total=6, begin=old.position(3))
    assert new.begin == DataPosition(3, 0, 12)
    batches = [batch for _, batch in islice(new.batches(3), 6)]
    assert [len(b) for b in batches] == [6, 4, 6, 6, 6, 4]
    assert [i for batch in batches[:2] for i in batch] == old.permutation(0)[12:]
    assert [i for batch in batches[2:] for i in batch] == old.permutation(1)
    assert [new.position(n) for n in (4, 5, 6, 9)] == [
        DataPosition(4, 0, 18),
        DataPosition(5, 1, 0),
        DataPosition(6, 1, 6),
        DataPosition(9, 2, 0),
    ]
    assert new.steps(2) == 9
    assert [b for _, b in islice(new.batches(6), 2)] == batches[3:5]


def test_a_part_of_an_epoch_is_dropped_or_refused_as_a_whole_one() -> None:
    """Under drop the rest of the epoch that fills no batch is left out; under error it is an error."""
    dropped = SampleOrder(22, 6, 7, shuffle=False, last_batch="drop", begin=DataPosition(3, 0, 12))
    assert [batch[0] for _, batch in islice(dropped.batches(3), 4)] == [12, 0, 6, 12]
    with pytest.raises(ConfigError, match="the last 10 of 22 samples are 1 batches of 6 and 4 left over"):
        SampleOrder(22, 6, 7, shuffle=False, last_batch="error", begin=DataPosition(3, 0, 12))
