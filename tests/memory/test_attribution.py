"""From notes of blocks to bytes by category: who named them, who asked for them, how long they lived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from unipar.backend import Category
from unipar.memory.account import PhaseName, PhasePeak
from unipar.memory.recording.attribution import Attribution, plain_step_seconds
from unipar.memory.sources.events import CallSite, NamedStorage, PhaseMark, RankEvents, classify_callers
from unipar.memory.sources.malloc_meter import NOTE_DTYPE

BASE, SMALL, MAIN, OTHER = 1000, 100, 7, 8
LIBRARY, C10, PYTHON = 1, 2, 3
FILES = ((0, 2, "/lib/libtorch_cpu.so"), (2, 3, "/lib/libc10.so"), (3, 4, "/usr/bin/python3.11"))
MARKS = (
    "start",
    "data",
    "forward",
    "backward",
    "update",
    "between",
    "data",
    "forward",
    "backward",
    "update",
    "between",
)


class Tape:
    """Blocks that come and go between the marks of two steps, each with its size in bytes."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.marks: list[PhaseMark] = []
        self.live, self.small, self.peak = BASE, SMALL, BASE
        self.named: list[NamedStorage] = []
        self.sites: list[CallSite] = []

    def mark(self, phase: str) -> None:
        when = float(len(self.marks))
        self.marks.append(PhaseMark(len(self.rows), phase, self.peak, self.live, self.small, when=when))
        self.peak = self.live

    def come(self, address: int, size: int, *, caller: int = C10, thread: int = MAIN) -> None:
        self._note(address, caller, size, thread)

    def go(self, address: int, size: int, *, thread: int = MAIN) -> None:
        self._note(address, 0, -size, thread)

    def few(self, size: int) -> None:
        """A block that is too small to be noted."""
        self.live += size
        self.small += size
        self.peak = max(self.peak, self.live)

    def _note(self, address: int, caller: int, size: int, thread: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
        self.rows.append((address, caller, size, self.live, self.small, thread, max(size, 0)))

    def name(self, address: int, size: int, category: Category, name: str) -> None:
        self.named.append(NamedStorage(len(self.rows), address, size, category, name))

    def replay(self, *, shared: bool = True) -> Attribution:
        self.mark("end")
        events = np.array(self.rows, dtype=NOTE_DTYPE)
        kinds, owners = classify_callers(events["caller"].tolist(), FILES)
        seen = RankEvents(events, kinds, owners, BASE, SMALL, MAIN, shared, self.marks, self.named, self.sites)
        return Attribution(seen)


Said = Callable[[Tape], None]


def played(events: dict[int, Sequence[Said]]) -> Tape:
    """The marks of two steps; after the i-th, what is said for it."""
    tape = Tape()
    for i, phase in enumerate(MARKS):
        tape.mark(phase)
        for said in events.get(i, ()):
            said(tape)
    return tape


def came(address: int, size: int, **more: int) -> Said:
    return lambda tape: tape.come(address, size, **more)


def went(address: int, size: int, **more: int) -> Said:
    return lambda tape: tape.go(address, size, **more)


def few(size: int) -> Said:
    return lambda tape: tape.few(size)


def named(address: int, size: int, category: Category, name: str) -> Said:
    return lambda tape: tape.name(address, size, category, name)


def phase(tape: Tape, name: PhaseName, *, shared: bool = True) -> PhasePeak:
    replay = tape.replay(shared=shared)
    return replay.phase(name, replay.windows)


def test_a_named_block_keeps_its_name_for_its_whole_life() -> None:
    """The block came while the model was built, and was named in the first forward."""
    tape = played({0: [came(16, 4000)], 2: [named(16, 4000, "parameters", "w"), came(32, 2000), went(32, 2000)]})
    assert phase(tape, "built").held == {"parameters": 4000}
    assert phase(tape, "forward").held == {"parameters": 4000, "temporaries": 2000}
    assert phase(tape, "forward").largest[0].name == "w"


def test_the_highest_moment_of_tensors_is_not_that_of_a_workspace() -> None:
    """A library's 5,000 bytes make the peak while a tensor has 100; tensors are highest later, with 3,000."""
    workspace = [came(16, 100), came(32, 5000, caller=LIBRARY), went(32, 5000), went(16, 100)]
    tape = played({2: [*workspace, came(48, 3000), went(48, 3000)]})
    forward = phase(tape, "forward")
    assert (forward.peak, forward.held) == (5100, {"temporaries": 100, "library": 5000})
    assert forward.tensors == {"temporaries": 3000}


def test_a_storage_with_two_names_counts_once() -> None:
    """A tied weight, or gradients that are views of one bucket; the category that comes first wins."""
    twice = [
        named(16, 4000, "communication", "bucket"),
        named(16, 4000, "gradients", "w"),
        named(16, 4000, "gradients", "v"),
    ]
    tape = played({0: [came(16, 4000)], 2: twice})
    assert phase(tape, "forward").held == {"gradients": 4000}


def test_a_view_into_a_block_names_the_block() -> None:
    """A library may hand out the middle of one buffer."""
    tape = played({0: [came(16, 4000)], 2: [named(1016, 1000, "masters", "flat")]})
    assert phase(tape, "update").held == {"masters": 4000}


def test_an_address_that_is_used_again_is_another_block() -> None:
    """The name was said of the first."""
    tape = played(
        {
            0: [came(16, 4000)],
            1: [named(16, 4000, "buffers", "b"), went(16, 4000)],
            2: [came(16, 3000)],
            3: [went(16, 3000)],
        }
    )
    assert phase(tape, "forward").held == {"activations": 3000}


def test_what_outlives_its_forward_is_an_activation() -> None:
    """And what goes within its phase is a temporary."""
    tape = played(
        {2: [came(16, 4000), came(32, 2000), went(32, 2000)], 3: [came(48, 1500), went(48, 1500), went(16, 4000)]}
    )
    assert phase(tape, "forward").held == {"activations": 4000, "temporaries": 2000}
    assert phase(tape, "backward").held == {"activations": 4000, "temporaries": 1500}


def test_a_batch_may_go_when_the_next_one_is_there() -> None:
    """The block came with the data."""
    tape = played({1: [came(16, 4000)], 6: [came(32, 4000), went(16, 4000)], 8: [went(32, 4000)]})
    assert phase(tape, "forward").held == {"activations": 4000}


def test_a_tensor_that_nobody_names_and_that_stays_is_unattributed() -> None:
    """Whether it came in the building, in a forward or in a backward."""
    for where in (0, 2, 3):
        tape = played({where: [came(16, 5_000_000)]})
        found = phase(tape, "update")
        assert found.held == {"unattributed": 5_000_000}
        assert found.unattributed == 1.0


def test_what_building_used_for_a_while_is_a_temporary() -> None:
    """The whole model before it is split: over several of its phases."""
    tape = played({0: [came(16, 4000)], 1: [went(16, 4000)]})
    assert phase(tape, "built").held == {"temporaries": 4000}


@pytest.mark.parametrize(("shared", "category"), [(True, "communication"), (False, "temporaries")])
def test_other_threads_work_for_other_ranks(shared: bool, category: str) -> None:
    """Where there are any."""
    tape = played({3: [came(16, 4000, thread=OTHER), went(16, 4000)]})
    assert phase(tape, "backward", shared=shared).held == {category: 4000}


@pytest.mark.parametrize(
    ("shared", "thread", "category"),
    [(True, OTHER, "communication"), (True, MAIN, "unattributed"), (False, OTHER, "unattributed")],
)
def test_a_collective_may_hold_a_gradient_beyond_its_phase(shared: bool, thread: int, category: str) -> None:
    """Its thread lets go of what it was given when it gets to it; the place where it was made is in the name."""
    tape = played({3: [came(16, 4000)], 4: [went(16, 4000, thread=thread)]})
    found = phase(tape, "backward", shared=shared)
    assert found.held == {category: 4000}
    assert [block.name for block in found.largest] == [
        "freed at the end of a collective" if category == "communication" else ""
    ]


def test_what_is_no_tensor_is_told_by_whose_code_asked() -> None:
    """Python's own is the runtime's; the name is that of the file."""
    tape = played({2: [came(16, 4000, caller=LIBRARY), came(32, 3000, caller=PYTHON)]})
    found = phase(tape, "forward")
    assert found.held == {"library": 4000, "runtime": 3000}
    assert [block.name for block in found.largest] == ["libtorch_cpu.so", "python3.11"]


def test_a_site_says_what_lives_too_short_to_be_held() -> None:
    """A gathered parameter, by the line that asked for it."""
    tape = played({2: [came(16, 4000), went(16, 4000)]})
    tape.sites.append(CallSite(0, 1, "empty in gather", "communication"))
    found = phase(tape, "forward")
    assert found.held == {"communication": 4000}
    assert found.largest[0].name == "empty in gather"


def test_small_blocks_and_freed_old_ones_are_the_runtimes() -> None:
    """The sum is the peak that was measured, whatever it is made of."""
    tape = played({2: [few(300), went(99, 200), came(16, 4000)]})
    found = phase(tape, "forward")
    assert found.peak == 4100
    assert found.held == {"unattributed": 4000, "runtime": 100}


def test_what_malloc_rounds_up_is_the_runtimes() -> None:
    """A parameter has the bytes that were asked for."""
    tape = played({0: [came(16, 4000)], 2: [named(16, 3992, "parameters", "w")]})
    tape.rows[0] = (*tape.rows[0][:-1], 3992)
    assert phase(tape, "forward").held == {"parameters": 3992, "runtime": 8}


def test_parts_add_up_to_the_peak_that_was_measured() -> None:
    """What came and went between two notes is nobody's, and not left out."""
    tape = played(
        {
            2: [came(16, 4000), few(700), few(-700), came(32, 100)],
            3: [went(16, 4000)],
        }
    )
    found = phase(tape, "forward")
    assert found.peak == 4700
    assert sum(found.held.values()) == 4700
    assert found.held["unattributed"] == 600 + 100


def test_a_phase_that_was_fullest_when_it_began() -> None:
    """Nothing came in it."""
    tape = played({2: [came(16, 4000)], 3: [went(16, 4000)]})
    assert phase(tape, "backward").held == {"activations": 4000}


def test_activations_that_autograd_does_not_know_of() -> None:
    """By lifetime two, by address one: the other is nobody's, in every step that has the same forward."""
    both, gone = [came(16, 4000), came(32, 5000)], [went(16, 4000), went(32, 5000)]
    tape = played({2: both, 3: gone, 7: both, 8: gone})
    replay = tape.replay()
    assert replay.saved(0, 2, {16}) == (9000, 4000)
    for windows in (replay.windows[:6], replay.windows[6:]):
        assert replay.phase("forward", windows).held == {"activations": 4000, "unattributed": 5000}


def test_a_fiftieth_of_the_activations_may_be_unknown() -> None:
    """What a loss returns, say."""
    tape = played({2: [came(16, 98_000), came(32, 2000)], 3: [went(16, 98_000), went(32, 2000)]})
    replay = tape.replay()
    assert replay.saved(0, 2, {16}) == (100_000, 98_000)
    assert replay.phase("forward", replay.windows).held == {"activations": 100_000}


def test_the_curve_of_a_step() -> None:
    """Bytes beyond the base by time: a phase without allocations has its length; within one they are evenly spread."""
    tape = played({2: [came(16, 4000)], 3: [went(16, 4000)]})
    replay = tape.replay()
    step = replay.windows[2:5]
    assert [window.seconds for window in step] == [1.0, 1.0, 1.0]
    assert list(replay.curve(step, [1.0, 2.0, 5.0])) == [
        *[(0.0, 0), (0.0625, 4000)],
        *[(0.125, 4000), (0.25, 0)],
        *[(0.375, 0), (1.0, 0)],
    ]
    assert list(replay.marked(step, [1.0, 2.0, 5.0])) == [(0.0, "forward"), (0.125, "backward"), (0.375, "update")]
    assert list(replay.curve(replay.windows[4:5], [1.0])) == []


def test_the_curve_reaches_the_peak_that_small_blocks_made() -> None:
    """Blocks below what is noted, between two notes, and in a phase without any note: its highest point has them."""
    crumbs = [few(1000), few(1016), few(-2016)]
    tape = played({2: [came(16, 4000), *crumbs, came(32, 100)], 3: [went(16, 4000), went(32, 100)], 4: crumbs})
    replay = tape.replay()
    step = replay.windows[2:5]
    assert [window.peak - BASE for window in step] == [6016, 4100, 2016]
    assert list(replay.curve(step, [1.0, 1.0, 2.0])) == [
        *[(0.0, 0), (1 / 12, 4000), (2 / 12, 6016)],
        *[(0.25, 4100), (0.25 + 1 / 12, 100), (0.25 + 2 / 12, 0)],
        *[(0.5, 0), (0.75, 2016), (1.0, 0)],
    ]


def test_a_phase_that_was_fullest_when_it_began_keeps_its_curve() -> None:
    """Its first point is its peak; nothing inside is raised."""
    replay = played({2: [came(16, 4000)], 3: [went(16, 4000), few(300)]}).replay()
    assert [held for _, held in replay.curve(replay.windows[2:4], [1.0, 1.0])] == [0, 4000, 4000, 0, 0]


def test_phases_are_as_long_as_in_a_plain_step() -> None:
    """The least of several; of a step with other phases nothing is taken, and without any its own time stays."""
    windows = played({}).replay().windows
    shown, short, other = windows[2:5], [replace(w, seconds=0.5) for w in windows[2:5]], windows[1:5]
    assert plain_step_seconds(shown, [windows[2:5], short, other]) == [0.5, 0.5, 0.5]
    assert plain_step_seconds(shown, [other]) == [1.0, 1.0, 1.0]
