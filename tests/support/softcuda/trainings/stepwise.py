"""A character GPT whose loop tells the emulator which step it is in."""

from __future__ import annotations

from typing_extensions import override

from examples.char_gpt import CharGPT
from tests.support.softcuda import findings
from unipar.task import Run


class StepwiseGPT(CharGPT):
    """Findings belong to a step from its begin to that of the next, the reading of the next batch included."""

    @override
    def train(self, run: Run) -> None:
        for share in run.batches():
            findings.begin_step(run.done + 1)
            run.step(share)
        findings.begin_step(0)
