"""Findings about an observed training: what its ranks have done is compared when it has ended, without the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from unipar.backend.observed_library import TrainingFault
from unipar.observing.libraries import way_out
from unipar.results.observation import TrainingFinding
from unipar.results.observed_rank import LAST_STEP, ObservedRank, ObservedState
from unipar.utils.text import count_of, first_few, join_with_and

_NOTES: Final[frozenset[TrainingFault]] = frozenset(
    {"same dropout", "unsynced batch norm", "coarse dtype", "schedule too fast"}
)
"""Faults that many scripts have on purpose."""


def find_findings(ranks: Sequence[ObservedRank]) -> list[TrainingFinding]:
    """Return all findings about the ranks of a command; of each kind there is one."""
    found: dict[TrainingFault, TrainingFinding] = {}
    for finding in (*_of_worlds(ranks), *_of_single_ranks(ranks), *_between_ranks(ranks)):
        found.setdefault(finding.kind, finding)
    return sorted(found.values(), key=lambda finding: finding.severity != "fault")


def what_was_compared(ranks: Sequence[ObservedRank], findings: Sequence[TrainingFinding]) -> list[str]:
    """Return the things that were compared between ranks, or looked at, without a finding."""
    kinds = {finding.kind for finding in findings}
    several = _form_one_world(ranks)
    copies = several and _hold_one_model(ranks)
    steps = _common_steps(ranks)
    stepped = any(rank.states for rank in ranks)
    looked: list[tuple[TrainingFault, str, bool]] = [
        ("unequal initial weights", "initial weights", copies and _share(ranks, lambda rank: rank.initial)),
        ("unequal copies", "weights and states", copies and _share_after(ranks, steps, _weights_of)),
        ("unreduced gradients", "gradients", copies and _share_after(ranks, steps, _gradients_of)),
        ("unequal microbatches", "backwards in a step", several and not any(rank.uneven for rank in ranks)),
        ("same batches", "batches", several and not _share_samples(ranks) and all(rank.batches for rank in ranks)),
        ("weights outside the optimizer", "the optimizer's weights", stepped),
        ("update without effect", "the update's effect", stepped),
    ]
    return [what for kind, what, known in looked if known and kind not in kinds]


def _finding(
    kind: TrainingFault, says: str, observed: Sequence[ObservedRank], /, *, note: bool = False, **more: object
) -> TrainingFinding:
    return TrainingFinding.model_validate(
        {
            "kind": kind,
            "severity": "note" if note or kind in _NOTES else "fault",
            "says": says,
            "way_out": way_out(kind, observed[0].libraries),
            **more,
        }
    )


def _of_worlds(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    alone = [rank for rank in ranks if rank.size == 1]
    launched = max(rank.launched_size for rank in ranks)
    if alone and launched > 1:
        yield _finding(
            "no group",
            f"the launcher started {launched} processes, and {len(alone)} of them trained "
            "alone, without a process group: nothing is averaged",
            ranks,
        )


def _of_single_ranks(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    for rank in ranks:
        for fault in rank.faults:
            yield _finding(
                fault.kind,
                f"rank {rank.rank}: {fault.detail}",
                ranks,
                ranks=(rank.rank,),
                step=fault.step,
                parameter=fault.parameter,
            )
    first = ranks[0]
    if first.size > 1 and first.batch_norms:
        yield _finding(
            "unsynced batch norm",
            f"{first_few(first.batch_norms)} normalize{'s' if len(first.batch_norms) == 1 else ''} with the samples of "
            "one rank alone",
            ranks,
            parameter=first.batch_norms[0],
        )


def _between_ranks(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    if not _form_one_world(ranks):
        return
    if _hold_one_model(ranks):
        yield from _initial_weights(ranks)
        yield from _gradients(ranks)
        yield from _copies(ranks)
    yield from _microbatches(ranks)
    yield from _batches(ranks)
    yield from _dropout(ranks)


def _form_one_world(ranks: Sequence[ObservedRank]) -> bool:
    """Return whether these are several ranks of a process group."""
    return len(ranks) > 1 and all(rank.size > 1 for rank in ranks)


def _share(ranks: Sequence[ObservedRank], digests: Callable[[ObservedRank], Mapping[str, int]]) -> bool:
    """Return whether several ranks have a value of one name, so that there is something to compare."""
    return any(number > 1 for number in Counter(name for rank in ranks for name in digests(rank)).values())


def _share_after(
    ranks: Sequence[ObservedRank], steps: Sequence[int], of: Callable[[ObservedState], Mapping[str, int]]
) -> bool:
    return any(_share(ranks, partial(_values_after, step, of)) for step in steps)


def _share_samples(ranks: Sequence[ObservedRank]) -> bool:
    """Return whether ranks split a model's tensors, so that they read the same samples."""
    return any(rank.splits_tensors or (rank.split and _has_split_names(rank)) for rank in ranks)


def _hold_one_model(ranks: Sequence[ObservedRank]) -> bool:
    """Return whether the whole weights of all ranks have the same names: not those of a pipeline's stages."""
    names = [{name for name in rank.initial if " part " not in name} for rank in ranks]
    return all(each == names[0] for each in names)


def _initial_weights(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    names = _unequal(ranks, lambda rank: rank.initial)
    if names:
        others = _others(ranks, lambda rank: rank.initial.get(names[0]))
        yield _finding(
            "unequal initial weights",
            f"before the first update {first_few(names)} had other values on {_name_ranks(others)} than on rank "
            f"{ranks[0].rank}",
            ranks,
            ranks=others,
            step=1,
            parameter=names[0],
        )


def _gradients(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    for step in _common_steps(ranks):
        names = _unequal(ranks, partial(_values_after, step, _gradients_of))
        if names:
            total = len(ranks[0].states[step].gradients)
            yield _finding(
                "unreduced gradients",
                f"the optimizers of the ranks were given unequal gradients for {len(names)} of {total} weights "
                f"({first_few(names)}): they were not reduced over the ranks{_but_averaged(ranks)}",
                ranks,
                note=bool(_but_averaged(ranks)),
                step=step,
                parameter=names[0],
            )
            return


def _copies(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    own = {norm for rank in ranks for norm in rank.batch_norms}
    averaged = _but_averaged(ranks)
    for step in _common_steps(ranks):
        for what, values_of in (("weight", _weights_of), ("optimizer state", _states_of), ("buffer", _buffers_of)):
            values = partial(_values_after, step, values_of)
            names = [name for name in _unequal(ranks, values) if name.rpartition(".")[0] not in own]
            if names:
                others = _others(ranks, partial(_value_after, values, names[0]))
                total = len(values(ranks[0]))
                # at the end a rank may have changed its copy on purpose, such as to export it
                after = "at the end of the script" if step == LAST_STEP else f"after step {step}"
                yield _finding(
                    "unequal copies",
                    f"{after} {len(names)} of {count_of(total, what)} differ between the ranks: {first_few(names)} on "
                    f"{_name_ranks(others)}{averaged}",
                    ranks,
                    note=step == LAST_STEP or bool(averaged),
                    ranks=others,
                    step=step or ranks[0].states[step].steps,
                    parameter=names[0],
                )
                return


def _but_averaged(ranks: Sequence[ObservedRank]) -> str:
    """Return a clause on weights that were unequal and then equal again, as some scripts average them; else ""."""
    steps = [step for step in _common_steps(ranks) if step != LAST_STEP]
    unequal = [bool(_unequal(ranks, partial(_values_after, step, _weights_of))) for step in steps]
    later = (step for step, (before, now) in zip(steps[1:], pairwise(unequal), strict=True) if before and not now)
    step = next(later, None)
    return "" if step is None else f"; after step {step} the weights were equal again, as if the script averaged them"


def _values_after(step: int, of: Callable[[ObservedState], Mapping[str, int]], rank: ObservedRank) -> Mapping[str, int]:
    return of(rank.states[step])


def _value_after(values: Callable[[ObservedRank], Mapping[str, int]], name: str, rank: ObservedRank) -> int | None:
    return values(rank).get(name)


def _weights_of(state: ObservedState) -> Mapping[str, int]:
    return state.weights


def _gradients_of(state: ObservedState) -> Mapping[str, int]:
    return state.gradients


def _states_of(state: ObservedState) -> Mapping[str, int]:
    return state.states


def _buffers_of(state: ObservedState) -> Mapping[str, int]:
    return state.buffers


def _microbatches(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    if any(rank.uneven for rank in ranks):
        return
    for step, counts in enumerate(zip(*(rank.backwards for rank in ranks), strict=False), 1):
        if len(set(counts)) > 1:
            usual = Counter(counts).most_common(1)[0][0]
            others = tuple(r.rank for r, n in zip(ranks, counts, strict=False) if n != usual)
            yield _finding(
                "unequal microbatches",
                f"the ranks made {join_with_and([str(n) for n in counts])} backwards in one step: a mean over ranks "
                "does not weigh their samples equally",
                ranks,
                ranks=others,
                step=step,
            )
            return
    begun = [rank.begun for rank in ranks if rank.begun is not None]
    if len(begun) == len(ranks) and max(begun) > min(begun):
        yield _finding(
            "unequal microbatches",
            f"the ranks began {join_with_and([str(n) for n in begun])} steps",
            ranks,
            ranks=tuple(rank.rank for rank, n in zip(ranks, begun, strict=True) if n < max(begun)),
            step=min(begun) + 1,
        )


def _batches(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    if _share_samples(ranks):
        return
    batches = [rank.batches for rank in ranks]
    losses = [rank.losses for rank in ranks]
    work = f"{count_of(len(ranks), 'rank')} do the work of one"
    if all(batches) and len(set(batches)) == 1:
        what = "their loaders gave all ranks the same first batches"
        if len({each[:1] for each in losses}) == 1 or _unequal(ranks, lambda rank: rank.initial):
            yield _finding("same batches", f"{what}: {work}", ranks, step=1)
        elif any(rank.dropout for rank in ranks):
            yield _finding(
                "same batches", f"{what}: {work}, unless each takes its part of them", ranks, note=True, step=1
            )
    elif not any(batches) and len(losses[0]) > 2 and len(set(map(repr, losses))) == 1:
        yield _finding("same batches", f"all ranks had the same losses: {work}", ranks, step=1)


def _has_split_names(rank: ObservedRank) -> bool:
    """Return whether weights are split along several axes, as tensor parallelism splits them."""
    return any("," in name.partition(" part ")[2] for name in rank.initial)


def _dropout(ranks: Sequence[ObservedRank]) -> Iterator[TrainingFinding]:
    randoms = [rank.random for rank in ranks]
    if any(rank.splits_tensors for rank in ranks):
        return  # their dropout must drop the same places
    if all(rank.dropout for rank in ranks) and randoms[0] and all(random == randoms[0] for random in randoms):
        step = min(randoms[0])
        yield _finding(
            "same dropout",
            "the random numbers of all ranks are in the same state, so dropout drops the same places on all of them",
            ranks,
            step=step,
        )


def _common_steps(ranks: Sequence[ObservedRank]) -> list[int]:
    """Return the steps after which all ranks recorded their values, the last one if all had taken equally many."""
    steps = [step for step in ranks[0].states if all(step in rank.states for rank in ranks)]
    same_end = LAST_STEP in steps and len({rank.states[LAST_STEP].steps for rank in ranks}) == 1
    return [*sorted(step for step in steps if step != LAST_STEP), *([LAST_STEP] if same_end else [])]


def _unequal(ranks: Sequence[ObservedRank], digests: Callable[[ObservedRank], Mapping[str, int]]) -> list[str]:
    """Return the names of which ranks have unequal digests."""
    values: dict[str, set[int]] = {}
    for rank in ranks:
        for name, digest in digests(rank).items():
            values.setdefault(name, set()).add(digest)
    return [name for name, each in values.items() if len(each) > 1]


def _others(ranks: Sequence[ObservedRank], digest: Callable[[ObservedRank], int | None]) -> tuple[int, ...]:
    """Return the ranks whose digest is not that of most ranks, or of the first."""
    digests = [digest(rank) for rank in ranks]
    counts = Counter(digests)
    usual = max(counts, key=lambda value: (counts[value], -digests.index(value)))
    return tuple(rank.rank for rank, value in zip(ranks, digests, strict=True) if value not in (usual, None))


def _name_ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {first_few([str(n) for n in numbers])}"
