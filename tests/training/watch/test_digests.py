"""Digests differ where a bit does, and where equal elements change alike."""

from __future__ import annotations

import pytest
import torch

from unipar.training.watch.digests import digest_tensor


@pytest.mark.parametrize("numel", [1, 1_022, 1_023, 5_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_element_makes_another_digest(numel: int, dtype: torch.dtype) -> None:
    """The first and the last element count, in a row and behind the last one."""
    t = torch.arange(numel).to(dtype)
    before = digest_tensor(t)
    assert before == digest_tensor(t.clone())
    for at in (0, numel - 1):
        changed = t.clone()
        changed[at] += 300
        assert digest_tensor(changed) != before


def test_equal_elements_that_change_alike_make_another_digest() -> None:
    """A norm's weights begin as ones, an even number of them, and may all take the same step."""
    assert digest_tensor(torch.ones(4_092)) != digest_tensor(torch.full((4_092,), 0.5))


def test_parts_of_a_tensor_have_digests() -> None:
    """A view, a column, and nothing at all."""
    t = torch.arange(12.0).view(3, 4)
    assert digest_tensor(t[:, 1]) == digest_tensor(torch.tensor([1.0, 5.0, 9.0]))
    assert digest_tensor(t[3:]) == digest_tensor(torch.empty(0))
