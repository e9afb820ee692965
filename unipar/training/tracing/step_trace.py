"""`StepTracer`: torch.profiler around some steps of a rank, with the names of phases and collectives (`log.trace`)."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch.distributed as dist
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateUsage] - no public way
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities
from typing_extensions import override

from unipar.backend import Engine
from unipar.backend.engine import DelegatingEngine
from unipar.config.config import Trace
from unipar.distributed.device import bytes_allocated, has_own_memory
from unipar.distributed.world import World
from unipar.memory.recording.bytes_sent_recorder import CallGroups, CollectiveMode, bytes_of_call
from unipar.memory.recording.held_bytes import bytes_held_by
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import trace_path
from unipar.training.tracing.trace_file import (
    TracedRange,
    complete_trace,
    largest_entries,
    range_name,
    write_trace,
)
from unipar.utils.procfs import anonymous_memory

_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
"""Variable of torch's profiler, whose lines about its own start would be among a rank's."""

_ACTIVITIES: Final = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
"""Activities of devices that torch's profiler records, where torch is built for them."""


class Note(Protocol):
    """Function that writes an event into this rank's run log."""

    def __call__(self, event: str, **fields: Any) -> None: ...


@final
class StepTracer:
    """Trace of the steps of `log.trace` on one rank; other ranks only wait for those that are traced."""

    def __init__(
        self,
        settings: Trace,
        world: World,
        run: Path,
        heartbeat: HeartbeatWriter,
        engines: Sequence[Engine],
        note: Note,
        *,
        memory: bool,
    ) -> None:
        """`memory`: the bytes that `engines` hold are counted, by category, as each phase begins."""
        self.steps = settings.numbers
        self._ranks = [rank for rank in settings.ranks if rank < world.size]
        self._world, self._run, self._heartbeat, self._engines = world, run, heartbeat, engines
        self._note, self._memory = note, memory
        self.active = False
        """Whether steps are being traced, on whichever rank."""

        self._profile: Any = None
        self._ranges: list[TracedRange] = []
        self._groups = CallGroups(world.mesh)
        self._around = ExitStack()
        self._step, self._phase = ExitStack(), ExitStack()
        self._earlier: Callable[[str], None] | None = None
        self._seconds: list[float] = []
        self._before: float | None = None
        self._began = 0.0
        self._first = 0

    def begin(self, step: int, before: float | None) -> None:
        """Begin with this step; `before`: seconds of a step since the last logged one, if there was any."""
        self.active, self._before, self._first = True, before, step
        self._heartbeat.set_phase("waiting")
        if self._world.rank in self._ranks:
            self._start()
        self._world.synchronize()
        self._world.barrier()  # else the trace of one rank would show how another one starts its profiler

    def _start(self) -> None:
        if _profiler_enabled():  # a second one would take its events
            self._note(
                "no trace", said="another profile is being recorded, and torch has only one; the training goes on"
            )
            return
        os.environ.setdefault(_LOG_LEVEL, "99")
        on = _ACTIVITIES.get(self._world.device.type, ProfilerActivity.CPU)
        activities = {ProfilerActivity.CPU, on} & supported_activities()
        profiled = profile(activities=activities)
        try:
            with warnings.catch_warnings():
                # of torch below 2.12, at every start: it concerns profiles of several cycles
                warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
                profiled.__enter__()
        except Exception as e:  # a right may be missing
            self._fail("torch's profiler did not start", e)
            return
        self._profile = profiled
        self._earlier, self._heartbeat.on_phase = self._heartbeat.on_phase, self._mark
        self._around.callback(self._restore_phases)
        for engine in self._engines:
            self._around.enter_context(_traced_methods(engine, self._range))
        if self._world.size > 1 and dist.is_initialized() and not _names_collectives(activities):
            self._around.enter_context(_CollectiveRanges(self._groups, self._range))

    def _restore_phases(self) -> None:
        if self._heartbeat.on_phase == self._mark:  # memory that is no longer recorded wants no phases
            self._heartbeat.on_phase = self._earlier

    def before(self, step: int) -> None:
        """Begin a step of the trace."""
        self._began = time.perf_counter()
        if self._profile is not None:
            self._phase.close()
            self._step.enter_context(self._range(TracedRange(f"step {step}")))

    def after(self, step: int) -> None:
        """End a step of the trace, and the trace with its last one."""
        if step == self.steps[-1]:
            self._world.synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        if self._profile is not None:
            self._phase.close()
            self._step.close()
        if step == self.steps[-1]:
            self.end(together=True)

    def end(self, *, together: bool) -> None:
        """Write what was traced; `together`: all ranks call this, and wait until it is written."""
        if not self.active:
            return
        self.active = False
        self._heartbeat.set_phase("waiting")
        if self._profile is not None:
            try:
                self._write()
            except Exception as e:  # the profiler's own errors, and those of a full disk, must not end the training
                self._fail("the trace could not be written", e)
        store = self._world.store
        if together and store is not None:
            keys = {rank: f"traced/{self._world.launch}/{self._first}/{rank}" for rank in self._ranks}
            if (own := keys.get(self._world.rank)) is not None:
                store.set(own, "yes")
            while not store.check([*keys.values()]):  # without a limit: a large trace takes its time
                time.sleep(0.05)

    def drop(self) -> None:
        """End after an error: nothing is written."""
        self.active = False
        with suppress(Exception):
            self._stop()

    def _fail(self, what: str, error: Exception) -> None:
        self._note("no trace", said=f"{what} ({type(error).__name__}: {error}); the training goes on")

    def _stop(self) -> Any:
        """End the profile, if there is one, and return it."""
        profiled, self._profile = self._profile, None
        self._phase.close()
        self._step.close()
        self._around.close()
        if profiled is not None:
            profiled.__exit__(None, None, None)
        return profiled

    def _write(self) -> None:
        profiled, rank = self._stop(), self._world.rank
        file = trace_path(self._run, rank)
        file.parent.mkdir(exist_ok=True)
        raw = file.with_name(f".rank-{rank}.json")
        try:
            profiled.export_chrome_trace(str(raw))
            trace: dict[str, Any] = json.loads(raw.read_bytes())
        finally:
            raw.unlink(missing_ok=True)
        complete_trace(trace, self._ranges, rank, lambda kind, group: self._groups.find(kind, group).axis)
        counted_on, entries = largest_entries(trace)
        write_trace(trace, file)
        if not self._seconds:
            return
        self._note(
            "trace",
            step=self._first + len(self._seconds) - 1,
            first=self._first,
            file=f"{file.parent.name}/{file.name}",
            seconds=sum(self._seconds) / len(self._seconds),
            before=self._before,
            counted_on=counted_on,
            entries=[entry._asdict() for entry in entries],
        )

    def _mark(self, phase: str) -> None:
        """Begin the range of a phase; it ends with the next one."""
        if self._earlier is not None:
            self._earlier(phase)
        self._phase.close()
        if phase != "waiting":
            held = self._held() if self._memory else {}
            self._phase.enter_context(self._range(TracedRange(phase, held=held)))

    def _held(self) -> dict[str, int]:
        """Return the bytes that are allocated now, by category."""
        device = self._world.device
        held: dict[str, int] = {**bytes_held_by(self._engines, device.type)}
        allocated = bytes_allocated(device) if has_own_memory(device) else anonymous_memory()
        return held | {"unattributed": max(0, allocated - sum(held.values()))}

    def _range(self, traced: TracedRange) -> AbstractContextManager[Any]:
        """Context manager: a range of the trace."""
        self._ranges.append(traced)
        return record_function(range_name(len(self._ranges) - 1))


def _names_collectives(activities: Iterable[Any]) -> bool:
    """Return whether torch itself tells the group and size of each collective: it does of NCCL's."""
    return ProfilerActivity.CUDA in activities and "nccl" in dist.get_backend()


MakeRange = Callable[[TracedRange], AbstractContextManager[Any]]


@contextmanager
def _traced_methods(engine: Engine, make_range: MakeRange) -> Generator[None]:
    """Context manager in which the methods that an engine has named for traces are ranges."""
    while isinstance(engine, DelegatingEngine):
        engine = engine.inner
    for method, name in engine.traced.items():
        setattr(engine, method, _with_range(getattr(engine, method), name, make_range))
    try:
        yield
    finally:
        for method in engine.traced:
            delattr(engine, method)


def _with_range(method: Callable[..., Any], name: str, make_range: MakeRange) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        with make_range(TracedRange(name)):
            return method(*args, **kwargs)

    return traced


@final
class _CollectiveRanges(CollectiveMode):
    """Dispatch mode that makes a range of each collective, with its axis and bytes."""

    def __init__(self, groups: CallGroups, make_range: MakeRange) -> None:
        super().__init__()
        self._groups, self._range = groups, make_range

    @override
    def call(self, kind: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        traced = TracedRange(kind)
        with self._range(traced):
            out = func(*args, **kwargs)
        axis = self._groups.of_call(kind, func._schema, args, kwargs).axis
        traced.name_collective(kind, axis, bytes_of_call(args, out))
        return out
