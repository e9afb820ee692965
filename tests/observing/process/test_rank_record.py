"""What one observed process writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unipar.observing.process.rank_record import RankRecord
from unipar.observing.process.script_state import ScriptState
from unipar.observing.settings import ObserveSettings
from unipar.results.observed_rank import LAST_STEP, LocalFault, ObservedRank, read_observed_ranks


def open_record(folder: Path, size: int = 2) -> tuple[RankRecord, ScriptState]:
    """Return the record of rank 0, and the state that it reads."""
    state = ScriptState(())
    record = RankRecord(ObserveSettings(folder=folder), state)
    record.open(0, size, size, "here")
    return record, state


def read(folder: Path, record: RankRecord, **end: Any) -> ObservedRank:
    """Return what the record says when the process has ended."""
    record.end("", **{"in_step": False, "compare": False} | end)
    (rank,) = read_observed_ranks(folder)
    return rank


def take_step(record: RankRecord, step: int) -> None:
    record.add_step(step, None, {}, None, 1, False)


@pytest.mark.parametrize(
    ("calls", "kinds"),
    [({1: 2}, ["schedule too fast"]), ({1: 1, 2: 1}, []), ({1: 3}, []), ({}, [])],
    ids=["as often as there are ranks", "two schedules", "more often", "none"],
)
def test_steps_of_schedules(tmp_path: Path, calls: dict[int, int], kinds: list[str]) -> None:
    """A schedule that takes as many steps in one of the optimizer as there are ranks; two take one each."""
    record, _ = open_record(tmp_path)
    for step in (1, 2):
        record.schedule_steps.update(calls)
        take_step(record, step)
    faults = read(tmp_path, record).faults
    assert [(fault.kind, fault.step) for fault in faults] == [(kind, 1) for kind in kinds]


def test_steps_that_were_parts_of_one(tmp_path: Path) -> None:
    """What was found in steps that are counted anew is forgotten with them."""
    record, _ = open_record(tmp_path)
    record.add_fault(LocalFault(kind="weights outside the optimizer", step=2, detail="not yet known"))
    take_step(record, 2)
    record.forget_steps()
    rank = read(tmp_path, record)
    assert (rank.faults, rank.steps, rank.backwards) == ((), 0, ())


def test_the_first_fault_of_a_kind(tmp_path: Path) -> None:
    """Of each kind the first one counts."""
    record, _ = open_record(tmp_path)
    for step in (2, 8):
        record.add_fault(LocalFault(kind="coarse dtype", step=step, detail="coarse"))
    assert [fault.step for fault in read(tmp_path, record).faults] == [2]


@pytest.mark.parametrize(("in_step", "begun"), [(False, 3), (True, 4)])
def test_steps_begun_at_the_end(tmp_path: Path, in_step: bool, begun: int) -> None:
    """A step that the end interrupts was begun; before the end the number is not known."""
    record, _ = open_record(tmp_path)
    take_step(record, 3)
    record.write("")
    (rank,) = read_observed_ranks(tmp_path)
    assert (rank.steps, rank.begun) == (3, None)
    assert read(tmp_path, record, in_step=in_step).begun == begun


def test_values_of_a_step(tmp_path: Path) -> None:
    """Digests before the first update, after the compared steps and at the end; a rate that there is none of."""
    record, state = open_record(tmp_path)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.weight, "lr": 0.5}, {"params": model.bias, "lr": 0.25}])
    model(torch.ones(1, 2)).sum().backward()
    state.add(optimizer)
    record.describe()
    for step in (1, 2):
        optimizer.param_groups[1]["lr"] = None if step == 2 else 0.25
        record.before_update(optimizer, step)
        with torch.no_grad():
            model.weight += 1
        take_step(record, step)
    rank = read(tmp_path, record, compare=True)
    assert rank.rates == {1: (0.5, 0.25), 2: (0.5,)}
    assert sorted(rank.states) == [LAST_STEP, 2]
    assert [*rank.states[2].gradients] == [*rank.initial] == ["weight", "bias"]
    assert rank.states[2].weights == rank.states[LAST_STEP].weights
    changed = {name for name, digest in rank.initial.items() if rank.states[2].weights[name] != digest}
    assert changed == {"weight"}


def test_a_process_is_known_from_its_first_update_on(tmp_path: Path) -> None:
    """What says which process trains is written before the first step has ended."""
    record, state = open_record(tmp_path)
    model = nn.Linear(2, 2)
    state.add(torch.optim.SGD(model.parameters()))
    assert list(read_observed_ranks(tmp_path)) == []
    record.describe()
    (rank,) = read_observed_ranks(tmp_path)
    record.end("", in_step=False, compare=False)
    assert (rank.pid, rank.steps, rank.parameters) == (os.getpid(), 0, 6)


def test_a_script_that_updates_its_weights_itself(tmp_path: Path) -> None:
    """Weights that are seen first at the end are not the initial ones."""
    record, state = open_record(tmp_path)
    model = nn.Linear(2, 2)
    state.add(torch.optim.SGD(model.parameters()))
    record.describe(updated=True)
    assert read(tmp_path, record).initial == {}


def test_processes_without_a_group(tmp_path: Path) -> None:
    """Processes that each have rank 0 of one take the next number that is free."""
    for number in range(2):
        record, _ = open_record(tmp_path, size=1)
        record.end("", in_step=False, compare=False)
        assert [rank.rank for rank in read_observed_ranks(tmp_path)] == [*range(number + 1)]


def test_an_evaluation_that_repeats_its_order(tmp_path: Path) -> None:
    """Batches that no backward follows are read to evaluate: their order may be the same in each epoch."""
    record = RankRecord(ObserveSettings(folder=tmp_path), ScriptState(()))
    data = TensorDataset(torch.arange(24.0))
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0))
    loss = torch.zeros((), requires_grad=True)

    def read(*, trains: bool) -> list[str]:
        record.add_epoch(loader)
        for batch in loader:
            record.add_batch(batch)
            if trains:
                record.add_backward(loss, 1, 1)
        return list(record._faults)  # pyright: ignore[reportPrivateUsage]

    assert read(trains=False) + read(trains=False) == []
    assert read(trains=True) == ["repeated order"]
