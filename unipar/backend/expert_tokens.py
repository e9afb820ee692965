"""`ExpertTokens`: how the tokens of some steps were spread over the experts of one layer, and over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExpertTokens:
    """Tokens of one layer of experts in some steps, of all ranks; a token counts once for each expert that gets it."""

    tokens: Sequence[int]
    """Tokens of each expert."""

    fullest_rank: float
    """Tokens of the rank whose experts got most, divided by the mean of all ranks that run the layer."""

    fullest_microbatch: float
    """The same of the microbatch and rank with most, divided by the mean of microbatches."""

    def to_row(self) -> dict[str, Any]:
        """Return tokens and summary as the run log has them."""
        return {
            "tokens": list(self.tokens),
            "fullest": round(self.fullest, 3),
            "entropy": round(self.entropy, 3),
            "unused": sum(n == 0 for n in self.tokens),
            "rank": round(self.fullest_rank, 3),
            "microbatch": round(self.fullest_microbatch, 3),
        }

    @property
    def fullest(self) -> float:
        """Share of the expert that got most, times the number of experts: 1 if all got as many."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens)

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares, divided by its largest: 1 if all got as many, 0 if one got all."""
        shares = [n / sum(self.tokens) for n in self.tokens if n]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens))
