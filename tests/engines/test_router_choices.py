"""Tokens for which two runs chose other experts."""

from __future__ import annotations

import torch

from unipar.engines.router_choices import MovedToken, RouterChoice, moved_tokens


def test_moved_tokens() -> None:
    """The order of a token's experts does not matter; each expert that is another one has its gap."""
    weights = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]])
    one = RouterChoice(torch.tensor([[0, 1], [2, 3], [4, 5]]), weights)
    other = RouterChoice(torch.tensor([[1, 0], [2, 7], [6, 5]]), weights * torch.tensor([[1.0], [1.0], [0.5]]))
    assert moved_tokens(one, other) == [MovedToken(1, 1, 3, 0.0), MovedToken(2, 0, 4, 0.5)]
    assert moved_tokens(one, one) == []
