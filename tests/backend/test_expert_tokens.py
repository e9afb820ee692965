"""Summary of the tokens that the experts of a layer got."""

from __future__ import annotations

from unipar.backend import ExpertTokens


def test_experts_without_tokens() -> None:
    """Two of four experts share eight tokens as 6 to 2: a share of 3 in 4, times four."""
    assert ExpertTokens([6, 2, 0, 0], 2.0, 2.25).to_row() == {
        "tokens": [6, 2, 0, 0],
        "fullest": 3.0,
        "entropy": 0.406,
        "unused": 2,
        "rank": 2.0,
        "microbatch": 2.25,
    }


def test_even_experts() -> None:
    """All ratios are 1, and no expert is unused."""
    even = ExpertTokens([5, 5, 5, 5], 1.0, 1.0)
    assert (even.fullest, round(even.entropy, 9)) == (1.0, 1.0)
    assert even.to_row()["unused"] == 0
