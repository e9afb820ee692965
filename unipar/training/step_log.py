"""Log of a run: which steps are logged, and what the run log and the trackers get."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from unipar.profiling.observer import StepObserver
from unipar.profiling.work import CompiledWork
from unipar.run_folder.run_log import RunLog
from unipar.task import LocalBatch
from unipar.tracking.images import pixels_of
from unipar.tracking.writer import TrackerWriter
from unipar.training.trained_parts import (
    TrainedPart,
    collect_expert_tokens,
    collect_step_values,
    flatten_logged_step,
)

if TYPE_CHECKING:
    from unipar.memory.recording.memory_log import StepMemory
    from unipar.training.tracing.step_trace import StepTracer


@final
class StepLog:
    """Log of one rank: the first step, then every `log.every` steps, and the last."""

    def __init__(self, run_log: RunLog, trackers: TrackerWriter, every: int, observer: StepObserver) -> None:
        self._run_log, self._trackers, self._every = run_log, trackers, every
        self._observer = observer
        self._since_log = self._timed = self._samples = self._all_samples = 0
        self._weight: float | None = None
        self._since = time.perf_counter()
        self._memory: StepMemory | None = None
        self._trace: StepTracer | None = None
        self._seconds_of_row: float | None = None
        """Seconds of a step in the last row, unless that is the first step's."""

        self.traces = False
        """Whether this step is traced."""

        self._reasons: set[tuple[str, str]] = set()
        self._counted: dict[str, Any] = {}
        """Operations of a step, until a row has them."""

    def begin_after(self, done: int) -> None:
        """Go on after this many steps of another run: the same steps are logged as if it had not ended."""
        self._since_log = (done - 1) % self._every if done else 0
        self._since = time.perf_counter()

    def attach_memory(self, recorder: StepMemory) -> None:
        """Record the memory of logged steps by `recorder`."""
        self._memory = recorder

    def attach_trace(self, trace: StepTracer) -> None:
        """Trace the steps that `trace` names."""
        self._trace = trace

    def before_step(self, number: int, steps: int) -> None:
        """Begin to trace step `number` of `steps` if that is asked for, and to record it if it will be logged."""
        if self._trace is not None and number in self._trace.steps:
            self._begin_traced(self._trace, number)
        logs = self._since_log + 1 == self._every or number == steps or number == 1
        if self._memory is None and not self._observer.observes and not (logs and self._observer.in_logged_steps):
            return
        at = time.perf_counter()
        self._settle_work()
        if self._memory is not None:
            self._memory.before(logs=logs)
        if self._observer.in_logged_steps:
            self._observer.begin(measure=logs)
        self._since += time.perf_counter() - at  # not counted as time of a step

    def _begin_traced(self, trace: StepTracer, number: int) -> None:
        at = time.perf_counter()
        if not trace.active:
            trace.begin(number, (at - self._since) / self._timed if self._timed else self._seconds_of_row)
        trace.before(number)
        self.traces = True
        self._since += time.perf_counter() - at

    def after_traced_step(self, number: int) -> None:
        """End the trace of step `number`; after the last one, write what was traced."""
        assert self._trace is not None
        at = time.perf_counter()
        self._trace.after(number)
        self.traces = False
        if not self._trace.active:
            self._trace = None
        self._since += time.perf_counter() - at

    def end_trace(self) -> None:
        """Write what was traced if the run ends before the last step of its trace; other ranks do not wait."""
        if self._trace is not None:
            self._trace.end(together=False)

    def count(self, local_batch: LocalBatch, number: int, steps: int) -> bool:
        """Count the local batch of step `number` of `steps`; return whether that is logged."""
        self._since_log, self._timed, self._samples = self._since_log + 1, self._timed + 1, local_batch.samples
        self._all_samples += local_batch.samples
        if local_batch.weight is not None:
            self._weight = (self._weight or 0.0) + local_batch.weight
            self._observer.add_weight(local_batch.weight)
        return self._since_log == self._every or number == steps or number == 1

    def write_step(self, number: int, steps: int, parts: Mapping[str, TrainedPart]) -> None:
        """Write what the parts report of step `number` of `steps`."""
        elapsed = time.perf_counter() - self._since
        row = collect_step_values(parts) | {"samples": self._samples, "seconds": elapsed / self._timed}
        row |= self._work_values(elapsed) | self._counted
        self._counted = {}
        if experts := collect_expert_tokens(parts):
            row["experts"] = experts
        self._since_log = self._timed = self._all_samples = 0
        self._seconds_of_row = row["seconds"] if number > 1 else None
        self._weight = None
        if self._memory is not None:
            row["memory"] = [phase.model_dump(exclude={"largest"}) for phase in self._memory.after()]
            if self._memory.lost:
                self._run_log.note("memory", said=f"no longer recorded: {self._memory.lost}")
                self._memory = None
        self._run_log.note("step", step=number, of=steps, **row)
        self._trackers.write(number, flatten_logged_step(row))
        self._since = time.perf_counter()  # what was done since the step was taken is not its time

    def _work_values(self, elapsed: float) -> dict[str, float]:
        """Return what the steps since the last log did in this many seconds: all ranks together, by name."""
        waiting = self._observer.take_wait() if self._observer.in_logged_steps else None
        self._settle_work()
        named: dict[str, float] = {}
        if elapsed > 0:
            named["samples_per_second"] = self._all_samples / elapsed
            if self._weight is not None:
                named["tokens_per_second"] = self._weight / elapsed
        named |= self._observer.rates(self._timed, elapsed)
        if waiting is not None:
            named["waiting"] = waiting
        if (compiled := self._observer.compiled) is not None:
            named |= {"graph_breaks": compiled.break_count, "recompiles": compiled.recompile_count}
            self._note_reasons(compiled)
        return named

    def _settle_work(self) -> None:
        """Add up the first step's operations over ranks; the next row has them, a note says why there are none."""
        if self._observer.settle():
            if self._observer.flops is not None:
                self._counted = {"flops": self._observer.flops, "flops_by": self._observer.flops_by}
            for note in self._observer.notes:
                self._run_log.note("work", said=note)

    def _note_reasons(self, compiled: CompiledWork) -> None:
        """Write each reason of a graph break or recompile that is not written yet."""
        for kind, reasons in (("graph break", compiled.breaks), ("recompile", compiled.recompiles)):
            for why in reasons:
                if (kind, why) not in self._reasons:
                    self._reasons.add((kind, why))
                    self._run_log.note("compiler", what=kind, why=why)

    def write_values(self, event: str, step: int, named: Mapping[str, float]) -> None:
        """Write named values of an evaluation, or of the user's."""
        self._run_log.note(event, step=step, **named)
        self._trackers.write(step, {f"{event}/{k}": v for k, v in named.items()})

    def write_logged(self, step: int, named: Mapping[str, Any]) -> None:
        """Write what the user's code logs by name: numbers, and images."""
        images = {name: pixels for name, value in named.items() if (pixels := pixels_of(name, value)) is not None}
        numbers = {name: float(value) for name, value in named.items() if name not in images}
        if numbers:
            self.write_values("log", step, numbers)
        for name, pixels in images.items():
            if (file := self._trackers.keep_image(step, name, pixels)) is not None:
                self._run_log.note("image", step=step, name=name, file=f"{file.parent.name}/{file.name}")

    def note(self, event: str, **fields: Any) -> None:
        """Write an event into the run log alone."""
        self._run_log.note(event, **fields)

    def close(self) -> None:
        """End the trace and close the trackers."""
        self.end_trace()
        self._trackers.close()
