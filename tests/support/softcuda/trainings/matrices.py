"""A character GPT that makes its own optimizer, which updates each matrix as a whole."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from examples.char_gpt import CharGPT
from unipar.optimizers.muon import Muon


class OwnMuon(CharGPT):
    """Trains with Muon, of which its config knows nothing."""

    @override
    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return Muon(groups, lr=0.01)
