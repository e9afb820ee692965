"""Phases and steps of training loops, told from the calls that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from unipar.observing.process.step_phases import STEPS_WAITED, Phase, StepPhases


class Heard:
    """A listener that notes what it hears."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps: list[int] = []
        self.merges = 0

    def on_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def on_step_begin(self, step: int) -> None:
        self.phases.append(f"<{step}")

    def on_step_end(self, step: int) -> None:
        self.phases.append(f"{step}>")
        self.steps.append(step)

    def on_steps_merged(self) -> None:
        self.merges += 1
        self.steps.clear()

    @property
    def text(self) -> str:
        return " ".join(self.phases)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def loop(heard: Heard) -> StepPhases:
    seconds: Iterator[float] = iter(range(10000))
    phases = StepPhases(heard, lambda: float(next(seconds)))
    phases.on_phase = heard.on_phase
    return phases


def read(loop: StepPhases, *, trains: bool = True) -> None:
    loop.data_begins()
    loop.data_ends(trains=trains)


def backward(loop: StepPhases) -> None:
    loop.backward_begins()
    loop.backward_ends()


def update(loop: StepPhases, optimizer: str = "adam") -> None:
    loop.update_begins(optimizer)
    loop.update_ends()


def test_a_loop_with_a_loader(loop: StepPhases, heard: Heard) -> None:
    """Data, forward, backward, clip and update follow each other; a zero_grad after the update begins the next step."""
    for _ in range(3):
        read(loop)
        backward(loop)
        loop.clip_begins()
        update(loop)
        loop.gradients_dropped()
    loop.finish()
    assert heard.text == (
        "<1 data forward backward update between 1> <2 forward data forward backward update between 2> "
        "<3 forward data forward backward update between 3> <4 forward"
    )
    assert heard.steps == [1, 2, 3]


@pytest.mark.parametrize("first", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_a_loop_without_a_loader(loop: StepPhases, heard: Heard, first: bool) -> None:
    """Without a loader a step begins with zero_grad, or with backward if that comes before the first one."""
    for _ in range(4):
        if first:
            loop.gradients_dropped()
        backward(loop)
        update(loop)
        if not first:
            loop.gradients_dropped()
    loop.finish()
    # after the last zero_grad a step has begun whose forward does not come
    assert heard.steps == [1, 2, 3, 4]
    assert heard.text.count("backward") == 4
    assert heard.text.startswith("<1 forward backward update" if first else "<1 backward update between 1> <2 forward")


def test_gathered_gradients(loop: StepPhases, heard: Heard) -> None:
    """With three microbatches a step has three backwards, and forward after each but the last one."""
    counts: list[int] = []
    for _ in range(3):
        for _ in range(3):
            backward(loop)
        counts.append(loop.backwards)
        update(loop)
    loop.finish()
    assert (heard.steps, counts) == ([1, 2, 3], [3, 3, 3])
    assert heard.text.endswith("<3 backward forward backward forward backward update between 3>")


def test_two_optimizers_of_a_gan(loop: StepPhases, heard: Heard) -> None:
    """When the second optimizer takes its first step, the steps until then were parts of one; then each has both."""
    for _ in range(4):
        for optimizer in ("judge", "generator"):
            loop.gradients_dropped()
            backward(loop)
            update(loop, optimizer)
    loop.finish()
    assert (heard.merges, heard.steps) == (1, [1, 2, 3, 4])


def test_five_steps_of_one_optimizer_to_one_of_another(loop: StepPhases, heard: Heard) -> None:
    """A step is a whole cycle of five and one."""
    backwards: list[int] = []
    for _ in range(4):
        for optimizer in [*("judge",) * 5, "generator"]:
            loop.gradients_dropped()
            backward(loop)
            update(loop, optimizer)
        backwards.append(loop.backwards)
    loop.finish()
    assert (heard.merges, heard.steps, backwards[1:]) == (1, [1, 2, 3, 4], [6, 6, 6])


def test_an_optimizer_that_comes_late_merges_nothing(loop: StepPhases, heard: Heard) -> None:
    """A second optimizer after many steps makes the later steps longer, and leaves the earlier ones alone."""
    for step in range(20):
        backward(loop)
        update(loop)
        if step >= 15:
            backward(loop)
            update(loop, "judge")
    loop.finish()
    assert (heard.merges, heard.steps) == (0, [*range(1, 21)])


def test_an_optimizer_that_is_no_more(loop: StepPhases, heard: Heard) -> None:
    """After another one has replaced it, each step of that one is a step, at once if the script has dropped it."""
    for _ in range(12):
        backward(loop)
        update(loop)
    loop.keep_optimizers(set())
    for _ in range(5):
        backward(loop)
        update(loop, "second")
    loop.finish()
    assert (heard.merges, heard.steps) == (0, [*range(1, 18)])


def test_an_optimizer_that_takes_no_more_steps(loop: StepPhases, heard: Heard) -> None:
    """If the script only keeps it, the loop waits for it for some steps of the other, and then no longer."""
    for _ in range(12):
        backward(loop)
        update(loop)
    for _ in range(STEPS_WAITED + 5):
        backward(loop)
        update(loop, "second")
    loop.finish()
    assert heard.steps == [*range(1, 18)]


def test_optimizers_that_take_their_step_in_backward(loop: StepPhases, heard: Heard) -> None:
    """An optimizer for each parameter, called by hooks: a step is a backward, without an update of its own."""
    for _ in range(3):
        loop.backward_begins()
        for parameter in ("a", "b", "c"):
            update(loop, parameter)
        loop.backward_ends()
    loop.finish()
    assert (heard.merges, heard.steps) == (0, [1, 2, 3])
    assert heard.text == "<1 backward between 1> <2 backward between 2> <3 backward between 3>"


def test_an_optimizer_that_calls_backward_in_its_step(loop: StepPhases, heard: Heard) -> None:
    """LBFGS computes the loss several times within one step."""
    for _ in range(3):
        read(loop)
        loop.update_begins("lbfgs")
        for _ in range(4):
            loop.gradients_dropped()
            backward(loop)
        loop.update_ends()
    loop.finish()
    assert heard.steps == [1, 2, 3]
    assert heard.text.endswith(f"<3 data forward update{' backward update' * 4} between 3>")


def test_an_optimizer_within_another(loop: StepPhases, heard: Heard) -> None:
    """One that calls another in its step, such as ZeroRedundancyOptimizer, updates until its own step is over."""
    for _ in range(2):
        backward(loop)
        loop.update_begins("outer")
        loop.update_begins("inner")
        loop.update_ends()
        assert loop.phase == "update"
        loop.update_ends()
    loop.finish()
    assert (heard.merges, heard.steps) == (0, [1, 2])


@pytest.mark.parametrize("skipped", [1, 3])
def test_a_step_that_loss_scaling_skips(loop: StepPhases, heard: Heard, skipped: int) -> None:
    """A skipped step counts as a step with one backward, the very first one, too, and is marked."""
    marks: list[bool] = []
    for step in range(1, 5):
        backward(loop)
        if step != skipped:
            update(loop)
        loop.scaler_updated()
        marks.append(loop.skipped)
        assert loop.backwards == 1
    loop.finish()
    assert heard.steps == [1, 2, 3, 4]
    assert marks == [step == skipped for step in range(1, 5)]


def test_an_evaluation_between_steps(loop: StepPhases, heard: Heard) -> None:
    """Batches that are read without gradients begin no step of their own; their time is that of no phase."""
    for _ in range(2):
        read(loop)
        backward(loop)
        update(loop)
        for _ in range(3):
            read(loop, trains=False)
    loop.finish()
    assert heard.steps == [1, 2]
    assert heard.text.count("forward") == 2
    assert loop.step == 3  # begun by the last evaluation, and never ended


def test_seconds_of_a_step(loop: StepPhases, heard: Heard) -> None:
    """The seconds of the phases are those between the calls; each step begins anew."""
    found: list[dict[Phase, float]] = []
    ends: Callable[[int], None] = heard.on_step_end

    def note(step: int) -> None:
        found.append(dict(loop.seconds))
        ends(step)

    heard.on_step_end = note
    for _ in range(2):
        read(loop)
        backward(loop)
        update(loop)
    loop.finish()
    assert found[1] == {"data": 1.0, "forward": 1.0, "backward": 1.0, "update": 1.0, "between": 2.0}


def test_a_clip_within_backward_is_no_update(loop: StepPhases) -> None:
    """A clip outside of a step, or by a hook in backward, changes no phase; one after it begins the update."""
    loop.clip_begins()
    assert loop.phase == "start"
    loop.backward_begins()
    loop.clip_begins()
    assert loop.phase == "backward"
    loop.backward_ends()
    loop.clip_begins()
    assert loop.phase == "update"


def test_an_unfinished_step_is_not_finished_at_the_end(loop: StepPhases, heard: Heard) -> None:
    """A script that ends within a step has begun it, and not taken it."""
    backward(loop)
    update(loop)
    backward(loop)
    loop.finish()
    assert (heard.steps, loop.backwards) == ([1], 1)
