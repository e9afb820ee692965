"""Tasks whose loop tells the emulator which step it is in."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

import unipar
from examples.char_gpt import CharGPT
from examples.gan import Gan
from examples.two_towers import TwoTowers
from tests.conformance.lengths import Counted
from tests.support.softcuda import findings
from unipar.task import Run
from unipar.task.run import StepOutcome


class Stepwise(unipar.Task):
    """Findings belong to a step from its begin to that of the next, the reading of the next batch included."""

    @override
    def train(self, run: Run) -> None:
        step = run.step

        def announced(*args: Any, **kwargs: Any) -> StepOutcome:
            findings.begin_step(run.done + 1)
            return step(*args, **kwargs)

        run.step = announced
        super().train(run)
        findings.begin_step(0)


class StepwiseGPT(Stepwise, CharGPT):
    """A character GPT."""


class StepwiseGan(Stepwise, Gan):
    """Two parts with an optimizer each, which take turns."""


class StepwiseTowers(Stepwise, TwoTowers):
    """A contrastive loss over the global batch."""


class StepwiseTexts(Stepwise, Counted):
    """Samples of any length, in batches that are counted in tokens."""
