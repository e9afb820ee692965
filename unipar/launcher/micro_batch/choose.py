"""`choose_microbatch`: one size of a microbatch for one or several worlds, from the plan and by trial."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from unipar.errors import UniparError
from unipar.launcher.micro_batch.choice import PREFIX, CandidateWorld, ChosenMicro, common_candidates
from unipar.launcher.micro_batch.search import find_largest
from unipar.launcher.micro_batch.trials import TrialCode, Trials
from unipar.utils.text import count_of, format_size

MARGIN = 0.1
"""Share by which a predicted peak must exceed the limit for the size not to be tried."""

Say = Callable[[str], None]
"""Function that shows a line of progress."""


def write_line(line: str) -> None:
    """Write a line of progress to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def choose_microbatch(worlds: Sequence[CandidateWorld], code: TrialCode, limit: int, say: Say) -> ChosenMicro:
    """Return the largest microbatch that fits in all worlds; raise an error if nothing fits in any.

    A world in which nothing fits has no part in the choice, if another one has.
    """
    first = worlds[0].settled
    sizes = common_candidates(worlds)
    with Trials(code, worlds, limit, say) as trials:
        planned = trials.plan()
        _describe_plans(planned, limit, say)
        best, agreed, left = sizes[-1], set[str](), list(worlds)
        error: UniparError | None = None
        while world := next((w for w in left if w.name not in agreed), None):
            largest = _largest_in(
                world, [n for n in sizes if n <= best], planned[world.name], limit, trials, bool(agreed)
            )
            if largest is None:
                left.remove(world)
                plan = planned[world.name]
                error = error or trials.explain_lack(world, None if isinstance(plan, str) else min(plan.values()))
                if len(worlds) > 1:
                    say(f"{PREFIX}: nothing fits in {world.name}, which has no part in the choice")
                continue
            if largest < best:  # the others must be able to run it as well
                best, agreed = largest, set()
            agreed.add(world.name)
        if not left:
            assert error is not None
            raise error
        expected = {name: _largest_by(plan, limit) for name, plan in planned.items() if not isinstance(plan, str)}
        tried, more = count_of(len(trials.done), "trial"), _why_not_more(sizes, best, planned)
        say(f"{PREFIX}: {best} of {sizes[-1]}, after {tried}{more}")
        names = tuple(w.name for w in worlds)
        return ChosenMicro(best, first.sizes.total, names, first.device, limit, expected, tuple(trials.done))


def _largest_in(
    world: CandidateWorld,
    sizes: Sequence[int],
    plan: Mapping[int, int] | str,
    limit: int,
    trials: Trials,
    agreed: bool,
) -> int | None:
    """Return the largest of these sizes that fits in a world; `agreed`: the last of them fits in another one."""
    if not sizes:
        return None
    start, peaks = (sizes[-1] if agreed else None), dict[int, int]()
    if not isinstance(plan, str):
        start, peaks = min(_largest_by(plan, limit) or sizes[0], sizes[-1]), dict(plan)

    def hopeless(micro: int) -> bool:
        return peaks.get(micro, 0) > limit * (1.0 + MARGIN)

    return find_largest(sizes, start, lambda micro: trials.fits(world, micro), hopeless)


def _why_not_more(sizes: Sequence[int], best: int, planned: Mapping[str, Mapping[int, int] | str]) -> str:
    """Return what the next size needs by the plan of the world that needs most; "" if there is none."""
    more = next((n for n in sizes if n > best), 0)
    needs = [(plan[more], name) for name, plan in planned.items() if not isinstance(plan, str) and more in plan]
    return f"; {more} needs {format_size(max(needs)[0])} in {max(needs)[1]} by the plan" if needs else ""


def _largest_by(plan: Mapping[int, int], limit: int) -> int | None:
    """Return the largest microbatch that fits by a plan."""
    return max((micro for micro, peak in plan.items() if peak <= limit), default=None)


def _describe_plans(planned: Mapping[str, Mapping[int, int] | str], limit: int, say: Say) -> None:
    for name, plan in planned.items():
        if isinstance(plan, str):
            say(f"{PREFIX}: {name} is not planned, and tried from the smallest size on: {plan}")
        elif (micro := _largest_by(plan, limit)) is None:
            least = min(plan.values())
            say(f"{PREFIX}: by the plan nothing fits in {name}: {format_size(least)}, of {format_size(limit)}")
        else:
            say(f"{PREFIX}: by the plan {micro} fits in {name}: {format_size(plan[micro])} of {format_size(limit)}")
