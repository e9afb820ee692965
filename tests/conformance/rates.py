"""A task with a schedule of its own, for the conformance suite."""

from __future__ import annotations

import math

from typing_extensions import override

from tests.conformance import tasks


class Paced(tasks.Plain):
    """A rate that swings over the steps."""

    @override
    def schedule(self, step: int, steps: int) -> float:
        return 0.6 + 0.4 * math.cos(2.0 * math.pi * step / steps)
