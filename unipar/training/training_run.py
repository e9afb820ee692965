"""Training loop of one rank, the same under every backend: loader, step, evaluate, log."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Engine, Factor, Fn, Micro, Piece, Read, Step
from unipar.config import BatchSizes, Config
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import MicrobatchPlan
from unipar.data.stream_loader import StreamLoader
from unipar.distributed.world import World
from unipar.engines.learning_rate import RateSchedule
from unipar.engines.update_guard import skips_updates
from unipar.errors import ConfigError, NonFinite, Stopped, TaskError
from unipar.profiling.observer import StepObserver
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.run_log import RunLog
from unipar.task import LocalBatch, Run, Task
from unipar.task.run import Position, StepOutcome
from unipar.tracking.writer import TrackerWriter
from unipar.training.evaluating.early_stop import EarlyStop
from unipar.training.evaluating.evaluation import Evaluation, refuse_idle_evaluation, refuse_unsynced_evaluation
from unipar.training.evaluating.whole_model import GatheredModel
from unipar.training.local_batches import LocalBatchMaker
from unipar.training.losses.sample_rows import gather_rows
from unipar.training.losses.step_loss import StepLoss
from unipar.training.losses.through_parts import NumberedLoss, OutputFn, OutputsOfParts
from unipar.training.part_choice import PartChoice
from unipar.training.run_loaders import RunLoaders, refuse_shared_stream
from unipar.training.step_log import StepLog
from unipar.training.stopping import StateKeeper, StopAgreement, require_keeper
from unipar.training.trained_parts import ActivePart, TrainedPart, combine_recorded_parts, iterate_pieces, restore_parts
from unipar.training.watch.state_watch import StateWatch

if TYPE_CHECKING:
    from unipar.memory.recording.memory_log import StepMemory
    from unipar.training.tracing.step_trace import StepTracer

BatchObserver = Callable[[Sequence[tuple[Any, MicrobatchPlan]]], None]
"""Function that is called with this rank's microbatches of a step, and their plans."""


@final
class TrainingRun(Run):
    """`Run` of one rank in training, with hooks for `compare` and `verify`."""

    def __init__(
        self,
        task: Task,
        parts: Mapping[str, TrainedPart],
        world: World,
        config: Config,
        sizes: BatchSizes,
        *,
        run_log: RunLog,
        heartbeat: HeartbeatWriter,
        trackers: TrackerWriter,
        work: StepObserver,
    ) -> None:
        self.task, self._parts, self.world, self.config, self.sizes = task, parts, world, config, sizes
        self.rank, self.size, self.device = world.rank, world.size, world.device
        self.done = 0
        self._choice = choice = PartChoice(parts, task, config)
        self.heartbeat, self.work = heartbeat, work
        self._log = StepLog(run_log, trackers, config.log.every, work)
        self._mark = heartbeat.set_phase
        self._loss = StepLoss(task, world, config, self._mark, work)
        self._rates = RateSchedule(config.train.schedule, task.schedule if task.defines("schedule") else None)
        self._local_steps, self._skips = config.train.local_steps, skips_updates(config)
        self._maker = LocalBatchMaker(task, world)
        self.watch = StateWatch(world, config, run_log, own_optimizer=task.defines("optimizer"))
        self._is_plain = choice.alone and self.watch.every is None and not self._loss.is_across
        """Whether nothing surrounds the engine's step with the task's own loss, unless it is observed."""

        self._plans: Sequence[MicrobatchPlan] = ()
        """This rank's plans of the current local batch."""

        self._local_batch: LocalBatch | None = None

        self._stop_agreement = StopAgreement(world, config.train.local_steps or 1)
        self.loaders = RunLoaders(self, task.collate if task.defines("collate") else None)
        self._steps = config.train.steps
        self._parts_stepped: list[ActivePart] = []
        self._due = False
        """Whether the current local batch is logged."""

        self._gathered_model = GatheredModel(self._choice.engine, self._choice.is_busy)
        self._evaluation: Evaluation | None = None
        rule = config.eval.stop
        self.early_stop = None if rule is None else EarlyStop(rule, world, self.note)
        self._boundary_hook: Callable[[int], None] | None = None
        self._batch_observer: BatchObserver | None = None
        self._checkpoints: StateKeeper | None = None
        self._began_at = 0

    # Steps and data

    @property
    @override
    def steps(self) -> int:
        if self._steps is None:
            assert self.config.train.epochs is not None
            self._steps = self.loader.steps(self.config.train.epochs)
        return self._steps

    @property
    def known_steps(self) -> int | None:
        """Number of steps of the run; None if the config counts epochs, and no data was asked for yet."""
        return self._steps

    @property
    @override
    def loader(self) -> MicrobatchLoader | StreamLoader:
        return self.loaders.get()

    @property
    @override
    def position(self) -> Position:
        return Position(self.done, *self.loader.place(self.done))

    def seek(self, step: int) -> None:
        """Set the number of steps done, after state was restored."""
        self.done = step

    def go_on_from(
        self, step: int, place_loader: Callable[[MicrobatchLoader | StreamLoader], None], *, of_loader: bool
    ) -> None:
        """Go on as a run would that has done these steps; `place_loader` has a loader read what is left of its data.

        `of_loader`: that of a script's dataloader, which it brings later, with `over`.
        """
        self.done = self._began_at = step
        self._log.begin_after(step)
        self.loaders.go_on(place_loader, of_loader=of_loader)
        if not of_loader:
            self.loader  # noqa: B018 - made here, and placed

    @property
    @override
    def resumed(self) -> bool:
        return self._began_at > 0

    @override
    def save(self) -> None:
        self._gathered_model.refuse("run.save()")
        keeper = require_keeper(self._checkpoints, self.done, self._local_steps, idle=not self._parts_stepped)
        keeper.save(self.done)

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have one state now, which they have not between two steps of `train.local_steps`."""
        return not self._local_steps or self.done % self._local_steps == 0 or self.done == self.steps

    def use_checkpoints(self, checkpoints: StateKeeper) -> None:
        """Save the state when it is due, at the end, and when the run is stopped."""
        self._checkpoints = checkpoints

    def check_state(self) -> None:
        """Raise NonFinite if a loss or norm that no step has reported yet is not; all ranks call it together."""
        for part in self._parts.values():
            part.finish()
            self._note_skipped(part)

    def mark(self, phase: str) -> None:
        """Set the phase of the heartbeat."""
        self._mark(phase)

    def note(self, event: str, **fields: Any) -> None:
        """Write an event into this rank's run log."""
        self._log.note(event, **fields)

    # Parts and their state

    @property
    @override
    def parts(self) -> Mapping[str, TrainedPart]:
        return self._parts

    @property
    def engine(self) -> Engine:
        """Engine of the model, or of its first part."""
        return self._choice.first.trained.engine

    @override
    def pieces(self) -> Iterator[Piece]:
        return iterate_pieces(self._parts)

    @override
    def restore(self, read: Read) -> None:
        restore_parts(self._parts, read)

    @override
    def frozen(self, part: str) -> Callable[[Fn, Any], Any]:
        return self._choice.frozen(part)

    def train(self) -> None:
        """Run the loop of the task, or the default one."""
        refuse_idle_evaluation(self.task, self.config)
        try:
            self.task.train(self)
        except NonFinite:
            if self._checkpoints is not None and not self._local_steps:  # all ranks raise it in the same step
                self._checkpoints.publish_pending()
            raise

    # Methods for the loop

    @override
    def batches(self) -> Iterator[LocalBatch]:
        return self._local_batches(self.loader)

    @override
    def over(self, dataloader: Any) -> Iterator[LocalBatch]:
        return self._local_batches(self.loaders.over(dataloader))

    @override
    def step(
        self, local_batch: LocalBatch, part: str | None = None, loss: Fn | Sequence[Fn] | NumberedLoss | None = None
    ) -> StepOutcome:
        if type(local_batch) is not LocalBatch:
            raise _not_a_local_batch(local_batch)
        if self._gathered_model.is_open:
            self._gathered_model.refuse("run.step()")
        active = self._choice.first
        if part is not None or loss is not None or not self._choice.alone:
            active = self._choice.select(part, loss, self._parts_stepped)
        trained, done = active.trained, self.done
        number = self.heartbeat.step = done + 1
        steps = self._steps or self.steps
        rate: Factor = self._rates.factor(done - trained.skipped, steps)
        if (lately_skipped := trained.lately_skipped) is not None:
            rate = trained.factor_on_device(lately_skipped, done, self._rates, steps)
        self._choice.active = active
        try:
            self._loss.begin(done, active.seeds)
            if loss is None and self._is_plain and not self.work.observes:
                out = trained.engine.step(self._loss.compute, local_batch.micros, rate, self._mark)
            else:
                out = self._take_step(active, local_batch, loss, rate, number)
        finally:
            self._choice.active = None
        trained.add_step(number, out, rate)
        if trained.fp8_unchecked is not None:
            self.note("precision", said=trained.check_fp8())
        if not self._parts_stepped:
            self._due = self._log.count(local_batch, number, steps)
        stopped = out.skipped is True and not self._skips
        reported = trained.report() if self._due or (stopped and not self._local_steps) else None
        if out.skipped is not False:
            trained.skip(number, out.skipped)
        if self._local_steps and (number % self._local_steps == 0 or number == steps):
            trained.engine.take_mean()
        if self.watch.every is not None:
            self.watch.check(trained, number, out, rate, local_batch, self._plans)
        if not self._choice.alone:
            self._parts_stepped.append(active)  # the local batch ends when the loop asks for the next one
        else:
            self.done = number
            if self._due:
                self._log_step()
        self._mark("between")
        return StepOutcome(number, reported)

    def _take_step(
        self,
        active: ActivePart,
        local_batch: LocalBatch,
        loss: Fn | Sequence[Fn] | NumberedLoss | None,
        rate: Factor,
        number: int,
    ) -> Step:
        """Return the result of a part's step, with all that may surround the engine's."""
        trained = active.trained
        with active, self.watch.around_step(trained, number):
            return self._loss.take_step(trained.engine, loss, local_batch.micros, self._plans, rate)

    @override
    def step_through(
        self, local_batch: LocalBatch, through: Mapping[str, OutputFn], *, part: str, loss: OutputFn
    ) -> StepOutcome:
        if type(local_batch) is not LocalBatch:
            raise _not_a_local_batch(local_batch)
        self._choice.check_through(through, part)
        outputs = OutputsOfParts(local_batch.micros)
        for name, fn in through.items():
            other = self._choice.member(name)
            self._mark("forward")
            with self._choice.forward_of(other):
                seeded = partial(self._loss.seeded, done=self.done, of_part=other.seeds)
                outputs.compute(name, other.trained.engine, fn, seeded)
        outcome = self.step(local_batch, part, outputs.last(loss))
        for name, fn in reversed([*through.items()]):
            self.step(local_batch, name, outputs.again(name, fn))
        return outcome

    @override
    def evaluate(self) -> dict[str, float]:
        self._gathered_model.refuse("run.evaluate()")
        if self._local_steps and self.done != self.steps:
            refuse_unsynced_evaluation(self.done, self._local_steps)
        if self._evaluation is None:
            engines = [part.engine for part in self._parts.values()]
            self._evaluation = Evaluation(self.task, engines, self.world, self.config, self.sizes, self._mark)
            refuse_shared_stream(self.loader.source, self._evaluation.source)
        self._mark("evaluate")
        with self._choice.forward_of(self._choice.first, evaluating=True), self.averaged():
            means = self._evaluation()
        self._log.write_values("eval", self.done, means)
        if self._checkpoints is not None:
            self._checkpoints.after_evaluation(self.done, means)
        if self.early_stop is not None:
            self.early_stop.after_evaluation(self.done, means)
        self._mark("between")
        return means

    @override
    @contextmanager
    def averaged(self) -> Generator[None]:
        self._gathered_model.refuse("run.averaged()")
        with ExitStack() as parts:
            for part in self._parts.values():
                parts.enter_context(part.engine.averages_in_place())
            yield

    @override
    def whole(self, part: str | None = None) -> AbstractContextManager[nn.Module]:
        return self._gathered_model.gather(part, self)

    @override
    def gather(self, tensor: Tensor, of: LocalBatch | Micro | None = None) -> Tensor:
        return gather_rows(self.world, tensor, of, self._local_batch)

    @override
    def log(self, **named: Any) -> None:
        self._log.write_logged(self.done, named)

    def record(self, steps: int) -> None:
        """Keep this rank's share of the loss, and the norm, of every step on the device."""
        for part in self._parts.values():
            part.record(steps)

    def recorded_steps(self) -> dict[str, Any]:
        """Return this rank's shares of the loss (their sum over ranks is the loss) and the norms; and of each part."""
        return combine_recorded_parts({name: part.recorded_steps() for name, part in self._parts.items()}, self.done)

    def on_batches(self, observer: BatchObserver) -> None:
        """Call `observer` at each step with this rank's microbatches, and the samples that are in them."""
        self._batch_observer = observer

    def use_loader(self, loader: MicrobatchLoader) -> None:
        """Take the batches from `loader` instead of the task's own data."""
        self.loaders.use(loader)

    def at_boundary(self, hook: Callable[[int], None]) -> None:
        """Call `hook` with the number of steps done at every step boundary, after the last step too."""
        self._boundary_hook = hook

    def attach_step_memory(self, recorder: StepMemory) -> None:
        """Record the memory of logged steps by `recorder`."""
        self._log.attach_memory(recorder)

    def attach_trace(self, trace: StepTracer) -> None:
        """Trace the steps that `trace` names."""
        self._log.attach_trace(trace)

    def end_trace(self) -> None:
        """Write what was traced so far; called where the run stops."""
        self._log.end_trace()

    def finish(self) -> None:
        """Report the last steps and close the trackers; called after the loop."""
        self._end_local_batch()
        for part in self._parts.values():
            part.finish()
            self._note_skipped(part)
        if self._checkpoints is not None:
            self._checkpoints.at_end(self.done)
        self._log.close()
        self.work.close()
        self._mark("end")

    # Internals

    def _stop_or_save(self, done: int) -> None:
        """Raise Stopped if the ranks have agreed to stop here, once the state is saved; else save it if that is due."""
        try:
            self._stop_agreement(done)
        except Stopped:
            if self._checkpoints is not None:
                self._checkpoints.at_end(done)
            raise
        if self._checkpoints is not None:
            self._checkpoints.at_boundary(done)

    def _local_batches(self, loader: MicrobatchLoader | StreamLoader) -> Iterator[LocalBatch]:
        every, steps, early_stop = self.config.eval.every, self.steps, self.early_stop
        self._rates.check(steps, self.world)
        _require_step(self.config, steps)
        ready = loader.batches(self.done)
        while self.done < steps and (early_stop is None or not early_stop.is_reached):
            before = self.done
            if self._gathered_model.is_open:
                self._gathered_model.refuse("the next local batch of run.batches() or run.over()")
            if self._boundary_hook is not None:
                self._boundary_hook(before)
            self._stop_or_save(before)
            self._log.before_step(before + 1, steps)
            self.heartbeat.step = before + 1
            self._mark("data")
            read = next(ready)
            self._plans = [plan for _, plan in read]
            if self._batch_observer is not None:
                self._batch_observer(read)
            if self.work.observes:
                local_batch = self.work.make_local_batch(partial(self._maker.make, read, loader, before))
            else:
                local_batch = self._maker.make(read, loader, before)
            self._local_batch = local_batch
            yield local_batch
            self._local_batch = local_batch = None
            if not self._choice.alone:
                self._end_local_batch()
            if self.done != before + 1:
                times = "once" if self._choice.alone else "at most once for each part, and for at least one part"
                taken = f"the loop called run.step {self.done - before} times for one local batch"
                raise TaskError(f"{taken}; call it {times}, with that local batch")
            if self._log.traces:
                self._log.after_traced_step(self.done)
            if every and self.done % every == 0:
                self.evaluate()
        if self._boundary_hook is not None:
            self._boundary_hook(self.done)

    def _end_local_batch(self) -> None:
        """Count the local batch's step, if several parts took one, and log their results if the step is due."""
        if self._parts_stepped:
            self._parts_stepped.clear()
            self.done += 1
            if self._due:
                self._log_step()

    def _log_step(self) -> None:
        """Log the parts' results of the last step."""
        for part in self._parts.values():
            if not part.is_reported:  # parts that took a step on this local batch have reported it already
                part.report()
            self._note_skipped(part)
        self._log.write_step(self.done, self.steps, self._parts)

    def _note_skipped(self, part: TrainedPart) -> None:
        """Note the steps whose update was skipped since the last call; raise NonFinite if no loss scale is left."""
        for number in (numbers := part.take_skipped_steps()):
            self.note("skipped", step=number)
        if numbers:
            part.engine.counters()  # raises the error


def _require_step(config: Config, steps: int) -> None:
    """Raise ConfigError if `train.epochs` end before the first evaluation, or the first update of averages."""
    ema = config.train.ema
    for key, every in (("eval.every", config.eval.every), ("train.ema.every", None if ema is None else ema.every)):
        if config.train.epochs is not None and every is not None and every > steps:
            raise ConfigError(
                f"{key}: {every} is beyond the last step: train.epochs: {config.train.epochs} are {steps} steps; lower "
                "it, or leave it out"
            )
    trace = config.log.trace
    if config.train.epochs is not None and trace is not None and trace.steps[1] > steps:
        raise ConfigError(
            f"log.trace.steps: {list(trace.steps)} ends beyond the last step: train.epochs: {config.train.epochs} are "
            f"{steps} steps; choose steps from 1 to {steps}, or leave log.trace out"
        )


def _not_a_local_batch(local_batch: object) -> TaskError:
    return TaskError(f"run.step takes a LocalBatch, as run.batches() and run.over() yield; it got {local_batch!r}")
