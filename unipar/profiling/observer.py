"""`StepObserver`: counts a step's operations once, and measures waiting in the steps for which that is asked."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from unipar.backend import Engine, Factor, Fn, LossFn, Mark, Micro, Step
from unipar.distributed.device import device_name, device_uuid, has_own_memory
from unipar.distributed.world import World
from unipar.profiling.compiling import CompileCounts, graphs_compiled
from unipar.profiling.fake_model import FakeModel, explain_uncounted
from unipar.profiling.flops import FlopCounter
from unipar.profiling.waiting import KERNEL_METHOD, SLEEP_METHOD, SleepClock, seconds_not_hidden
from unipar.profiling.work import CompiledWork, RankWork

FIRST_STEP = "in the first step, on all ranks"
WITHOUT_VALUES = "for the first microbatches of rank 0, without values"


@final
class StepObserver:
    """Observer of one rank's steps.

    Operations are counted in the first step, by a mode that leaves it as it is. Where ranks split one model, or graphs
    are compiled, rank 0 counts those of `fake`, a copy without values.
    """

    def __init__(
        self,
        world: World,
        *,
        splits: bool = False,
        compiles: bool = False,
        fake: FakeModel | None = None,
        why_no_fake: str = "",
        peak: float | None = None,
        counts: bool = True,
    ) -> None:
        """`splits`: ranks split one model; `peak`: of the device, in operations a second, or None if unknown.

        `counts`: operations are counted.
        """
        self._world, self._fake, self._why_no_fake, self._peak = world, fake, why_no_fake, peak
        self._on_fake = splits or compiles
        self._compiled = CompileCounts() if compiles else None
        self._counters: list[FlopCounter] | None = [] if counts else None
        """Counters of the first step, one for each part; None when all ranks have added them up, or none counts."""

        self._again: list[FlopCounter] = []
        """Counters of what the first step computes once more than the loss needs."""

        self.observes = counts
        """Whether the next step is observed: else an engine's step is run, and a share made, without this object."""

        self._stepped = False
        self._graphs_before = graphs_compiled()
        self._error = ""
        self.flops: float | None = None
        """Operations of forward and backward in one step, of the whole global batch."""

        self.notes: list[str] = []
        self.devices = world.size
        """Number of devices on which the ranks compute; some may share one."""

        self.in_logged_steps = world.device.type == "cpu" and world.size > 1
        """Whether waiting is measured in the steps that are logged."""

        self.keeps_weights = False
        self._weights: list[float] = []
        self._clock: SleepClock | None = None
        self._profile: Any = None
        self._measures = False
        self._began = 0.0
        self._waits: list[tuple[float, float]] = []

    # The engine's step

    def run_step(
        self,
        engine: Engine,
        fn: LossFn,
        micros: Sequence[Micro],
        factor: Factor,
        mark: Mark,
        plain: tuple[Fn, Sequence[Micro]],
    ) -> Step:
        """Run the engine's step; `plain` is the loss without seeds, and the microbatches of which each is run once."""
        if self._counters is not None:
            self._stepped = True
            if not self._on_fake:
                counter = FlopCounter()
                self._counters.append(counter)
                with counter:
                    return engine.step(counter.watched(fn), micros, factor, mark)
            self._count_on_fake(*plain)
        if self._clock is None or not self._measures:
            return engine.step(fn, micros, factor, mark)
        waited, slept = engine.seconds_waited(), self._clock.seconds
        self._clock.start()
        try:
            return engine.step(fn, micros, factor, mark)
        finally:
            self._clock.stop()
            if waited is not None:  # this library keeps the thread busy while it waits
                self._clock.seconds = slept + (engine.seconds_waited() or 0.0) - waited

    @contextmanager
    def counting_again(self) -> Generator[Callable[[LossFn], LossFn]]:
        """Context manager around forwards before the first step that the step runs again: it yields what watches them.

        Their operations are not those of the step, which is told in a note.
        """
        if self._counters is None or self._on_fake:
            yield _unwatched
            return
        counter = FlopCounter()
        self._again.append(counter)
        with counter:
            yield counter.watched

    def make_local_batch(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns: the weights of a share are summed over ranks, which is communication too."""
        if self._clock is None or not self._measures:
            return make()
        self._clock.start()
        try:
            return make()
        finally:
            self._clock.stop()

    def _count_on_fake(self, loss: Fn, micros: Sequence[Micro]) -> None:
        assert self._counters is not None
        if self._fake is None or self._counters or self._error:
            return
        try:
            self._counters.append(self._fake.count(loss, micros))
        except Exception as e:  # the user's code, on tensors that it does not expect
            self._error = explain_uncounted(e)

    def settle(self) -> bool:
        """Add up what all ranks counted in the first step, together; return whether this call did it."""
        if self._counters is None or not self._stepped:
            return False
        counters, self._counters = self._counters, None
        self.observes = self._measures
        why = self._why_uncounted(counters)
        self._fake = None
        size, device = self._world.size, self._world.device
        counts = self._world.rank == 0 if self._on_fake else self._world.leads
        mine = torch.zeros(3 + size, dtype=torch.float64, device=device)
        if counts:
            mine[0] = sum(counter.flops for counter in counters) * (self._world.data_size if self._on_fake else 1)
            mine[1] = float(bool(why))
            mine[2] = sum(counter.flops for counter in self._again)
        if has_own_memory(device):
            mine[3 + self._world.rank] = zlib.crc32(device_uuid(device).encode())
        flops, bad, again, *identifiers = self._world.sum(mine).tolist()
        self.devices = len(set(identifiers)) if has_own_memory(device) else size
        if not bad and flops:
            self.flops = flops
            if again:
                self.notes.append(
                    f"features of the whole batch were computed first, without gradients: {again:.3g} operations more, "
                    f"{again / flops:.0%} of the step's"
                )
        elif counts:
            self.notes.append(f"the operations of a step were not counted: {why or 'another rank could not count'}")
        if unknown := dict.fromkeys(name for counter in counters for name in counter.unknown):
            self.notes.append(
                f"without the operations of {', '.join(unknown)}, for which PyTorch's counter has no formula"
            )
        return True

    def _why_uncounted(self, counters: Sequence[FlopCounter]) -> str:
        """Return why this rank's count is not that of a whole step, or ""."""
        uncounted = dict.fromkeys(name for counter in counters for name in counter.uncounted)
        if uncounted:
            return f"PyTorch's counter has no formula for {', '.join(uncounted)}"
        if self._on_fake:
            return self._error or self._why_no_fake or ("" if counters or self._world.rank else "no step was taken")
        if graphs_compiled() > self._graphs_before:
            return "the task compiles a part of its model itself; set model.compile instead"
        if not any(counter.in_forward for counter in counters):
            return "the forward has no operation that PyTorch's counter knows"
        return ""

    # Between steps

    def begin(self, *, measure: bool) -> None:
        """Begin a step; `measure`: its waiting is measured, which takes some microseconds on the CPU.

        It is not measured in the first step, in which libraries set themselves up.
        """
        if self._measures:
            self.take_wait()
        self._measures = measure and self._counters is None and self._prepare()
        self.observes = self._measures or self._counters is not None
        if self._measures:
            if self._clock is not None:
                self._clock.seconds = 0.0
            self._began = time.perf_counter()

    def take_wait(self, *, keep: bool = False) -> float | None:
        """End what `begin` measured; return the share of the step in which this rank waited, or None if unknown."""
        if not self._measures:
            return None
        self._measures = self.observes = False  # the first step, in which operations are counted, is not measured
        step_seconds = time.perf_counter() - self._began
        waited = self._end_profile() if self._clock is None else self._clock.seconds
        if waited is None:
            return None
        if keep:
            self._waits.append((waited, step_seconds))
        return waited / step_seconds

    def forget_waits(self) -> None:
        """Forget the steps measured so far, because better ones follow."""
        self._waits.clear()

    def _prepare(self) -> bool:
        if has_own_memory(self._world.device):
            return self._begin_profile()
        if self._clock is not None:
            return True
        if self._world.size > 1 and dist.is_initialized() and "gloo" not in (how := dist.get_backend()):
            self._note(f"waiting was not measured: the processes communicate by {how}, whose threads may not sleep")
            return False
        try:
            self._clock = SleepClock()
        except OSError:
            self._note("waiting was not measured: this system does not tell when a thread sleeps")
            return False
        return True

    def _begin_profile(self) -> bool:
        if (kind := self._world.device.type) != "cuda":
            self._note(f"waiting was not measured: torch's profiler does not show the collectives of {kind}")
            return False
        try:
            self._world.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
        except Exception as e:  # another profiler may be in the way, or a right be missing
            self._note(f"waiting was not measured: torch's profiler did not start ({type(e).__name__}: {e})")
            return False
        return True

    def _end_profile(self) -> float | None:
        try:
            self._world.synchronize()
            self._profile.__exit__(None, None, None)
            spans = [
                (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
                for event in self._profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
        except Exception as e:
            self._note(f"waiting was not measured: torch's profiler failed ({type(e).__name__}: {e})")
            return None
        exposed = seconds_not_hidden(spans)
        if exposed is None and self._world.size > 1:
            self._note("waiting was not measured: no kernel of NCCL ran")
        return exposed

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def add_weight(self, weight: float | None) -> None:
        """Note the units of weight in a step's global batch, if they are kept."""
        if self.keeps_weights and weight is not None:
            self._weights.append(weight)

    # Results

    def rates(self, steps: int, seconds: float) -> dict[str, float]:
        """Return operations a second of all ranks, and the share of the devices' peak, as far as they are known."""
        if self.flops is None or seconds <= 0:
            return {}
        rate = self.flops * steps / seconds
        rates = {"flops_per_second": rate}
        return rates | ({"mfu": rate / (self._peak * self.devices)} if self._peak else {})

    @property
    def compiled(self) -> CompiledWork | None:
        """Counts of torch's compiler so far, or None if nothing is to be compiled."""
        return None if self._compiled is None else self._compiled.read()

    def count_compiling(self, *, on: bool) -> None:
        """Go on to count what torch compiles, or stop."""
        if self._compiled is not None:
            if on:
                self._compiled.resume()
            else:
                self._compiled.pause()

    def rank_work(self) -> RankWork:
        """Return all that this rank recorded."""
        on_device = has_own_memory(self._world.device)
        return RankWork(
            flops=self.flops,
            flops_by=self.flops_by,
            weights=tuple(self._weights),
            waits=tuple(self._waits),
            waits_by=(KERNEL_METHOD if on_device else SLEEP_METHOD) if self._waits else "",
            device=device_name(self._world.device) if on_device else "",
            device_id=device_uuid(self._world.device) if on_device else "",
            compiled=self.compiled,
            notes=tuple(self.notes),
        )

    @property
    def flops_by(self) -> str:
        """Description of how operations were counted."""
        return "" if self.flops is None else WITHOUT_VALUES if self._on_fake else FIRST_STEP

    def close(self) -> None:
        """Close the system's counter."""
        if self._clock is not None:
            self._clock.close()
            self._clock = None


def _unwatched(loss: LossFn) -> LossFn:
    return loss
