"""`ScriptFlops`: operations of one step of a script, counted as a run's are."""

from __future__ import annotations

from typing import Final, final

import torch

from unipar.distributed.device import device_name, device_uuid, has_own_memory
from unipar.observing.process.step_phases import StepPhases
from unipar.profiling.compiling import graphs_compiled
from unipar.profiling.flops import FlopCounter
from unipar.profiling.work import RankWork

COUNTED_STEP: Final = 2
"""Step whose operations are counted: it is not timed, and the first one may set libraries up."""


@final
class ScriptFlops:
    """Counter of the operations of this process in one step; it costs nothing in any other."""

    def __init__(self, phases: StepPhases) -> None:
        self._phases = phases
        self._counter: FlopCounter | None = None
        self.work: RankWork | None = None
        """Operations counted; None before the step has ended."""

    def step_begins(self, step: int) -> None:
        """Begin to count, if it is the step for it and nothing was compiled: graphs run unseen."""
        if step == COUNTED_STEP and not graphs_compiled():
            self._counter = FlopCounter(in_loss=self._computes_loss)
            self._counter.__enter__()

    def step_ends(self, step: int, device: torch.device) -> None:
        """End to count."""
        counter = self.drop()
        if step != COUNTED_STEP:
            return
        why = "the script compiles a part of its model" if graphs_compiled() else ""
        flops = None
        if counter is not None:
            why = why or counter.why_not_complete()
            flops = None if why else float(counter.flops)
        notes = [f"the operations of a step were not counted: {why}"] if why else []
        if counter is not None and counter.unknown:
            notes.append(counter.describe_unknown())
        self.work = RankWork(
            flops=flops,
            flops_by=f"in step {step}" if flops is not None else "",
            device=device_name(device) if has_own_memory(device) else "",
            device_id=device_uuid(device) if has_own_memory(device) else "",
            notes=tuple(notes),
        )

    def drop(self) -> FlopCounter | None:
        """Stop counting, and return the counter if there is one."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        return counter

    def _computes_loss(self) -> bool:
        """Return whether the script computes its loss now.

        Between two steps, and in an optimizer that is given a function, it does so where gradients are recorded.
        """
        phase = self._phases.phase
        return phase == "forward" or (phase in ("start", "between", "update") and torch.is_grad_enabled())
