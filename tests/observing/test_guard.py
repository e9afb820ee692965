"""What the guard says of ranks, each made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.observing.guard import find_findings, what_was_compared
from unipar.results.observation import TrainingFinding
from unipar.results.observed_rank import LAST_STEP, LocalFault, ObservedRank, ObservedState

WEIGHTS = {"a.weight": 1, "a.bias": 2, "b.weight": 3}


def state(steps: int = 8, **changes: Any) -> ObservedState:
    """A healthy state after a step; `changes`: another digest of a weight, by its name with __ for a point."""
    other = {name.replace("__", "."): digest for name, digest in changes.items()}
    return ObservedState(
        weights={name: other.get(name, digest) for name, digest in WEIGHTS.items()},
        states={"exp_avg of a.weight": 4},
        buffers={"norm.running_mean": 5, "seen": 6},
        gradients={name: digest + 10 for name, digest in WEIGHTS.items()},
        steps=steps,
    )


def rank(number: int, **changes: Any) -> ObservedRank:
    """A healthy rank of two with some fields changed."""
    fields: dict[str, Any] = {
        "rank": number,
        "size": 2,
        "launched_size": 2,
        "steps": 12,
        "begun": 12,
        "backwards": (1,) * 10,
        "losses": (1.0 + number, 0.5 + number, 0.25 + number),
        "batches": (1 + number, 2 + number, 3 + number),
        "initial": dict(WEIGHTS),
        "states": {2: state(2), 8: state(8), LAST_STEP: state(12)},
        "random": {2: 10 + number, 8: 20 + number},
    }
    return ObservedRank(**fields | changes)


def world(
    size: int = 2, *, first: dict[str, Any] | None = None, last: dict[str, Any] | None = None
) -> list[TrainingFinding]:
    """Return the findings of ranks of which the first and the last one have some fields changed."""
    middle = [rank(number, size=size, launched_size=size) for number in range(1, size - 1)]
    ends = [{"size": size, "launched_size": size} | (changes or {}) for changes in (first, last)]
    return find_findings([rank(0, **ends[0]), *middle, rank(size - 1, **ends[1])])


def only(findings: list[TrainingFinding]) -> TrainingFinding:
    """Return the one finding."""
    assert len(findings) == 1, findings
    return findings[0]


def test_healthy_ranks() -> None:
    """Nothing is found in two ranks that agree, and everything was compared."""
    ranks = [rank(0), rank(1)]
    assert find_findings(ranks) == []
    assert what_was_compared(ranks, []) == [
        "initial weights",
        "weights and states",
        "gradients",
        "backwards in a step",
        "batches",
        "the optimizer's weights",
        "the update's effect",
    ]


def test_one_rank() -> None:
    """One process without a group is compared with nobody."""
    alone = rank(0, size=1, launched_size=1, batch_norms=("norm",), dropout=True)
    assert find_findings([alone]) == []
    assert what_was_compared([alone], []) == ["the optimizer's weights", "the update's effect"]


def test_processes_that_each_train_alone() -> None:
    """Processes that a launcher has started, without a group, are no ranks: their weights are not compared."""
    found = only(find_findings([rank(n, size=1, initial={"a.weight": n}) for n in range(2)]))
    assert (found.kind, found.severity) == ("no group", "fault")
    assert found.says == (
        "the launcher started 2 processes, and 2 of them trained alone, without a process group: nothing is averaged"
    )
    assert found.way_out.startswith("call torch.distributed.init_process_group")
    alone = [rank(n, size=1) for n in range(2)]
    assert what_was_compared(alone, [found]) == ["the optimizer's weights", "the update's effect"]


def test_two_trainings_one_after_the_other() -> None:
    """Two processes that no launcher has started together are two trainings."""
    assert find_findings([rank(n, size=1, launched_size=1) for n in range(2)]) == []


def test_the_way_out_is_that_of_the_library() -> None:
    """Who uses Accelerate is told what to do there."""
    found = find_findings([rank(n, size=1, libraries=("Accelerate",)) for n in range(2)])
    assert only(found).way_out.startswith("give `accelerate launch` --multi_cpu")


def test_unequal_initial_weights() -> None:
    """The rank that differs from most others is named, with the first weight."""
    found = only(world(4, last={"initial": WEIGHTS | {"a.bias": 9}}))
    assert (found.kind, found.severity, found.step, found.parameter, found.ranks) == (
        "unequal initial weights", "fault", 1, "a.bias", (3,)
    )  # fmt: skip
    assert found.says == "before the first update a.bias had other values on rank 3 than on rank 0"


def test_a_first_rank_that_differs() -> None:
    """If rank 0 differs from all others, it is the one."""
    assert only(world(4, first={"initial": WEIGHTS | {"a.bias": 9}})).ranks == (0,)


def test_unreduced_gradients() -> None:
    """Unequal gradients are found where they first differ, before the copies that they make unequal."""
    other = state(2, a__weight=7)
    other.gradients.update({"a.weight": 99, "a.bias": 98})
    found = world(last={"states": {2: other, 8: state(8, a__weight=7), LAST_STEP: state(12)}})
    assert [finding.kind for finding in found] == ["unreduced gradients", "unequal copies"]
    assert (found[0].step, found[0].parameter, found[0].severity) == (2, "a.weight", "fault")
    assert found[0].says == (
        "the optimizers of the ranks were given unequal gradients for 2 of 3 weights (a.weight, a.bias): they were "
        "not reduced over the ranks"
    )


@pytest.mark.parametrize(
    ("what", "name", "says"),
    [
        ("weights", "b.weight", "after step 8 1 of 3 weights differ between the ranks: b.weight on rank 1"),
        ("states", "exp_avg of a.weight", "after step 8 1 of 1 optimizer state differ between the ranks: exp_avg of "),
        ("buffers", "seen", "after step 8 1 of 2 buffers differ between the ranks: seen on rank 1"),
    ],
)
def test_unequal_copies(what: str, name: str, says: str) -> None:
    """A weight, an optimizer state or a buffer that one rank alone has changed is named with step and rank."""
    other = state(8)
    getattr(other, what)[name] = 9
    found = only(world(last={"states": {2: state(2), 8: other, LAST_STEP: other}}))
    assert (found.kind, found.severity, found.step, found.parameter, found.ranks) == (
        "unequal copies", "fault", 8, name, (1,)
    )  # fmt: skip
    assert found.says.startswith(says)


def test_weights_that_are_averaged_from_time_to_time() -> None:
    """Weights that differ and are equal again later are those of local SGD: notes; if they stay unequal, faults."""
    other = state(2, a__weight=9)
    other.gradients["a.weight"] = 99
    found = world(last={"states": {2: other, 8: state(8), LAST_STEP: state(12)}})
    again = "; after step 8 the weights were equal again, as if the script averaged them"
    assert [(f.kind, f.severity, f.says.endswith(again)) for f in found] == [
        ("unreduced gradients", "note", True),
        ("unequal copies", "note", True),
    ]
    found = world(last={"states": {2: other, 8: state(8, a__weight=9), LAST_STEP: state(12)}})
    assert [(f.kind, f.severity) for f in found] == [("unreduced gradients", "fault"), ("unequal copies", "fault")]


def test_a_copy_that_differs_only_at_the_end() -> None:
    """After training a rank may change its model on purpose: a note."""
    found = only(world(last={"states": {2: state(2), 8: state(8), LAST_STEP: state(12, a__weight=9)}}))
    assert (found.kind, found.severity, found.step) == ("unequal copies", "note", 12)
    assert found.says.startswith("at the end of the script 1 of 3 weights differ between the ranks: a.weight on rank 1")


def test_ends_of_unequally_many_steps_are_not_compared() -> None:
    """A rank that was killed before the others has older weights; its steps are not known, either."""
    killed = {"begun": None, "steps": 8, "states": {2: state(2), LAST_STEP: state(8, a__weight=9)}}
    assert world(last=killed) == []
    assert world(3, first={"begun": 11}, last=killed) == []


def test_statistics_of_unsynced_batch_norms_differ() -> None:
    """Each rank's running mean is its own; another buffer that differs is found all the same."""
    other = state(8)
    other.buffers["norm.running_mean"] = 99
    changes = {"states": {2: state(2), 8: other}, "batch_norms": ("norm",)}
    found = only(world(first={"batch_norms": ("norm",)}, last=changes))
    assert (found.kind, found.severity, found.parameter) == ("unsynced batch norm", "note", "norm")
    assert found.says == "norm normalizes with the samples of one rank alone"
    other.buffers["seen"] = 99
    found = world(first={"batch_norms": ("norm", "second")}, last=changes)
    assert [(f.kind, f.parameter) for f in found] == [("unequal copies", "seen"), ("unsynced batch norm", "norm")]
    assert found[1].says == "norm, second normalize with the samples of one rank alone"


def test_parts_of_split_weights() -> None:
    """Parts are compared with the equal parts of other ranks alone."""
    parts = [{"a.weight part 0": 1}, {"a.weight part 1": 2}]
    assert world(first={"initial": parts[0]}, last={"initial": parts[1]}) == []
    split = [rank(n, initial=part, states={2: ObservedState(weights=part, steps=2)}) for n, part in enumerate(parts)]
    assert what_was_compared(split, [])[:2] == ["backwards in a step", "batches"]
    others = [{"a.weight part 0": 1}, {"a.weight part 0": 2}]
    found = only(world(first={"initial": others[0]}, last={"initial": others[1]}))
    assert (found.kind, found.parameter) == ("unequal initial weights", "a.weight part 0")


def test_stages_of_a_pipeline() -> None:
    """Ranks whose models have other weights hold parts of one: equal names are no copies."""
    stages = [{"embed": 1, "block.weight": 2}, {"block.weight": 3, "head": 4}]
    states = [{2: ObservedState(weights=stage, gradients=stage, steps=2)} for stage in stages]
    ends = [{"initial": stage, "states": each} for stage, each in zip(stages, states, strict=True)]
    assert world(first=ends[0], last=ends[1]) == []
    assert what_was_compared([rank(n, **end) for n, end in enumerate(ends)], [])[0] == "backwards in a step"


def test_unequal_microbatches() -> None:
    """The first step with unequal numbers of backwards, and who has another number than most."""
    found = only(world(3, last={"backwards": (1, 1, 2, 1)}))
    assert (found.kind, found.severity, found.step, found.ranks) == ("unequal microbatches", "fault", 3, (2,))
    assert found.says == (
        "the ranks made 1, 1 and 2 backwards in one step: a mean over ranks does not weigh their samples equally"
    )


def test_fewer_steps_on_one_rank() -> None:
    """A rank that began fewer steps than the others is named, with the first step that it lacks."""
    found = only(world(last={"steps": 9, "begun": 9, "states": {2: state(2)}}))
    assert (found.kind, found.step, found.ranks) == ("unequal microbatches", 10, (1,))
    assert found.says == "the ranks began 12 and 9 steps"


@pytest.mark.parametrize("changed", [{"backwards": (1, 2)}, {"steps": 9, "begun": 9}])
def test_a_wrapper_that_expects_uneven_batches(changed: dict[str, Any]) -> None:
    """Within `with model.join():` ranks may have fewer batches."""
    assert world(first={"uneven": True}, last={"uneven": True, "states": {}} | changed) == []


def test_same_batches() -> None:
    """The same first batches and losses on all ranks are a fault."""
    same = {"batches": (1, 2, 3), "losses": (1.0, 0.5, 0.25)}
    found = only(world(first=same, last=same))
    assert (found.kind, found.severity, found.step) == ("same batches", "fault", 1)
    assert found.says == "their loaders gave all ranks the same first batches: 2 ranks do the work of one"


def test_same_batches_of_which_each_rank_takes_its_part() -> None:
    """Other losses show that ranks compute other things; with dropout they may differ because of that."""
    same: dict[str, Any] = {"batches": (1, 2, 3)}
    assert world(first=same, last=same) == []
    found = only(world(first=same | {"dropout": True}, last=same | {"dropout": True}))
    assert (found.kind, found.severity) == ("same batches", "note")
    assert found.says.endswith("2 ranks do the work of one, unless each takes its part of them")


def test_same_batches_for_unequal_models() -> None:
    """Losses of unequal weights differ, whatever the batches are."""
    same: dict[str, Any] = {"batches": (1, 2, 3)}
    found = world(first=same, last=same | {"initial": WEIGHTS | {"a.bias": 9}})
    assert [finding.kind for finding in found] == ["unequal initial weights", "same batches"]


def test_same_samples_without_a_loader() -> None:
    """Equal losses of at least three steps show it where no loader was seen; of two steps they may be chance."""
    same = {"batches": (), "losses": (1.0, 0.5, 0.25)}
    found = only(world(first=same, last=same))
    assert (found.kind, found.severity) == ("same batches", "fault")
    assert found.says == "all ranks had the same losses: 2 ranks do the work of one"
    few = {"batches": (), "losses": (1.0, 0.5)}
    assert world(first=few, last=few) == []


@pytest.mark.parametrize(
    "split",
    [{"splits_tensors": True}, {"split": True, "initial": {"a.weight part 0,1": 1}}],
    ids=["tensors", "tensors and parts"],
)
def test_ranks_that_share_each_sample(split: dict[str, Any]) -> None:
    """Ranks that split tensors read the same samples, and drop the same places."""
    same = {"batches": (1,), "losses": (1.0,) * 3, "dropout": True, "random": {}} | split
    assert world(first=same, last=same) == []


def test_same_dropout() -> None:
    """Equal states of the random numbers at each recorded step are a note, if the model drops anything."""
    same: dict[str, Any] = {"random": {2: 1, 8: 2}}
    assert world(first=same, last=same) == []
    found = only(world(first=same | {"dropout": True}, last=same | {"dropout": True}))
    assert (found.kind, found.severity, found.step) == ("same dropout", "note", 2)
    assert world(first=same | {"dropout": True}, last={"random": {2: 1, 8: 3}, "dropout": True}) == []
    split: dict[str, Any] = same | {"dropout": True, "splits_tensors": True}
    assert world(first=split, last=split) == []


@pytest.mark.parametrize(
    ("kind", "severity"),
    [
        ("weights outside the optimizer", "fault"),
        ("update without effect", "fault"),
        ("repeated order", "fault"),
        ("coarse dtype", "note"),
        ("schedule too fast", "note"),
    ],
)
def test_faults_that_a_rank_finds_itself(kind: Any, severity: str) -> None:
    """Of those that several ranks find the first one is shown, with rank, step and parameter, and a way out."""
    faults = [(LocalFault(kind=kind, step=2 + n, parameter="a.bias", detail=f"detail {n}"),) for n in range(2)]
    found = only(world(first={"faults": faults[0]}, last={"faults": faults[1]}))
    assert (found.kind, found.severity, found.ranks, found.step, found.parameter, found.says) == (
        kind, severity, (0,), 2, "a.bias", "rank 0: detail 0"
    )  # fmt: skip
    assert found.way_out


def test_faults_come_before_notes() -> None:
    """What is surely wrong is said first, and what was found is not said to be without a finding."""
    note = LocalFault(kind="coarse dtype", step=2, detail="coarse")
    ranks = [rank(0, faults=(note,)), rank(1, initial=WEIGHTS | {"a.bias": 9})]
    found = find_findings(ranks)
    assert [finding.kind for finding in found] == ["unequal initial weights", "coarse dtype"]
    assert "initial weights" not in what_was_compared(ranks, found)
