"""Every cell trains to the numbers of one process, or is marked with who, what it raises, and why."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.conformance.cases import CASES, OURS, SIZES, Case, blocks_for
from tests.conformance.conftest import CaseResult, CellRunner
from tests.conformance.generation import Generating
from tests.conformance.local import train_locally_by_hand
from tests.conformance.marks import FSDP2, MARKS
from tests.conformance.plain import Result
from tests.conformance.selection import libraries_of, select_cases
from unipar.backend import offered_cells as backend_cells
from unipar.backend import registry
from unipar.backend.offered_cells import is_single_process
from unipar.config import Cell
from unipar.errors import NonFinite

BITS = {
    "bits, one microbatch": [
        ["native/nothing", "horovod/nothing", "accelerate/nothing", "deepspeed/nothing", *FSDP2,
         "native/optimizer", "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters",
         "accelerate/optimizer+zero", "accelerate/gradients+zero", "accelerate/parameters+zero"],
    ],
    "muon, bits": [
        ["native/nothing", "horovod/nothing", "accelerate/nothing", "deepspeed/nothing", *FSDP2,
         "native/optimizer", "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters",
         "accelerate/optimizer+zero", "accelerate/gradients+zero", "accelerate/parameters+zero"],
    ],
    "moments in bf16, bits": [
        ["native/nothing", "horovod/nothing", "accelerate/nothing", "deepspeed/nothing", *FSDP2,
         "native/optimizer", "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters",
         "accelerate/optimizer+zero", "accelerate/gradients+zero", "accelerate/parameters+zero"],
    ],
    "moments of 8 bits, bits": [
        ["native/nothing", "horovod/nothing", "accelerate/nothing", *FSDP2, "native/optimizer"],
    ],
    "bits, four microbatches": [
        ["native/nothing", "horovod/nothing", "accelerate/nothing", "deepspeed/nothing", "native/optimizer",
         "deepspeed/optimizer", "accelerate/optimizer+zero"],
        ["native/gradients", "native/parameters", "deepspeed/gradients", "deepspeed/parameters", "accelerate/gradients",
         "accelerate/parameters", "accelerate/gradients+zero", "accelerate/parameters+zero"],
    ],
}  # fmt: skip
"""Cells that add the same numbers in the same order: their results are equal to the last bit."""


EIGHT_CASES = ("ragged last batch", "token weights, ragged", "tied weights", "dropout", "state out and in")
"""Cases that are played on eight ranks, once."""


def test_agrees(hall: CellRunner, cell: Cell, size: int, case: str) -> None:
    """Losses, norms, parameters and evaluations are those of one process, within the stated tolerance."""
    wanted = CASES[case]
    if wanted.error:
        with pytest.raises(NonFinite) as caught:
            hall.result(cell, size, case)
        leads = size - cell.axes.tensor * cell.axes.context  # the last share's rank that counts
        assert str(caught.value).startswith(f"{wanted.error}{leads}: ")
        return
    near = wanted.tolerance
    if wanted.local:
        got, by_hand = hall.result(cell, size, case), train_locally_by_hand(wanted, size)
        assert got.losses == pytest.approx(by_hand["losses"], abs=near.loss, rel=0)
        assert got.norms[0] != got.norms[1], "the ranks took one step together"
        assert near.params is not None
        assert all(torch.allclose(t, by_hand["params"][n], atol=near.params, rtol=0) for n, t in got.params.items())
        return
    got, one = hall.result(cell, size, case), hall.plain(case, size, blocks_for(cell))
    assert got.losses == pytest.approx(one.losses, abs=near.loss, rel=0)
    assert list(got.parts) == list(reversed(one.parts))  # as model() names them; by hand, as they step
    for part, losses in one.parts.items():
        assert got.parts[part] == pytest.approx(losses, abs=near.loss, rel=0)
    if wanted.precision.startswith("bf16"):
        assert got.losses != pytest.approx(one.losses, abs=1e-5, rel=0), "computed in fp32"
    for rank in got.norms:
        assert rank == pytest.approx(one.norms, rel=near.norm)
    assert set(got.params) == set(one.params)
    if near.params is not None:
        apart = {n: float((t.double() - one.params[n].double()).abs().max()) for n, t in got.params.items()}
        assert max(apart.values()) <= near.params, apart
    if wanted.task is Generating:
        assert got.evals == [one.evals] * size
    if wanted.averaged:
        _check_averages(wanted, got, one)
    if wanted.more.get("eval"):
        assert len(got.evals[0]) == len(one.evals) == 3
        for rank in got.evals:
            for mine, theirs in zip(rank, one.evals, strict=True):
                assert mine == pytest.approx(theirs, abs=5e-6)


def _check_averages(wanted: Case, got: CaseResult, one: Result) -> None:
    """Averages are those of one process over this cell's weights to the last bit, and near those of one process.

    The weights themselves would not pass for their averages.
    """
    assert got.unequal_averages == []
    if wanted.several:
        return
    assert set(got.averages) == set(one.averages)
    if wanted.tolerance.params is not None:
        for name, average in one.averages.items():
            assert float((got.averages[name] - average).abs().max()) <= wanted.tolerance.params, name
            assert float((got.params[name] - average).abs().max()) > 10 * wanted.tolerance.params, name
        return
    off, apart = (_distance(tensors, one.averages) for tensors in (got.averages, got.params))
    assert off <= 0.2 * apart, (off, apart)


def _distance(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """Return the length of the difference of all tensors together."""
    return sum(float((tensors[n].double() - t.double()).square().sum()) for n, t in others.items()) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT_CASES)
def test_agrees_on_eight_ranks(hall: CellRunner, case: str) -> None:
    """Two shares of the data, two stages and two parts of each matrix, parameters split over the shares by FSDP2."""
    cell = Cell.parse("native/parameters+tensor2+pipeline2")
    hall.wanted.setdefault((cell, 8), list(EIGHT_CASES))
    test_agrees(hall, cell, 8, case)


def test_closed_by_default(hall: CellRunner) -> None:
    """Whatever a library opens in our worlds listens on loopback alone, and nothing is left in /dev/shm."""
    for (cell, size), names in hall.wanted.items():
        if (cell, size) not in hall.listens:
            hall.result(cell, size, names[0])
        elsewhere = [a for a in hall.listens[cell, size] if a != "0100007F"]  # 127.0.0.1
        assert (str(cell), size, elsewhere) == (str(cell), size, [])
        assert hall.listens[cell, size] or size == 1
        assert (str(cell), size, hall.left_in_shared_memory[cell, size]) == (str(cell), size, set())


@pytest.mark.parametrize(("name", "cells"), [(n, cells) for n, classes in BITS.items() for cells in classes])
def test_bits(hall: CellRunner, name: str, cells: list[str]) -> None:
    """At world 2 in fp32, with the norm in fp64 and neither fused nor foreach, a class of cells has one result."""
    there = [hall.result(Cell.parse(c), 2, name) for c in cells if name in hall.wanted.get((Cell.parse(c), 2), ())]
    if len(there) < 2:
        pytest.skip("fewer than two cells of this class are played")
    first, *others = there
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(t, first.params[n]) for n, t in other.params.items())


def test_sizes_are_played() -> None:
    """The suite's worlds: one process, two, and four."""
    assert SIZES == (1, 2, 4)


@pytest.mark.parametrize("library", OURS[1:])
def test_what_make_test_plays_covers_all(library: str) -> None:
    """In worlds of two each library plays each case that is its own, and each of its cells three or more."""
    cells = [
        cell for cell in backend_cells.cells_of_backend(registry.find_backend(library)) if not is_single_process(cell)
    ]
    by_cell = {cell: {name for name in select_cases(cell, 2, whole=False) if 2 in CASES[name].sizes} for cell in cells}
    assert min(map(len, by_cell.values())) >= 3
    wanted = {name for name, case in CASES.items() if 2 in case.sizes and any(case.on(cell) for cell in cells)}
    others = {name for name in wanted if library not in libraries_of(name)}
    marked = {name for mark in MARKS for name in others if any(mark.fits(cell, name, 2) for cell in cells)}
    assert set[str]().union(*by_cell.values()) - marked == wanted - others


def test_every_case_is_played_under_some_library() -> None:
    """Under native at least, or it is a variant, or it compiles, or it is for another library's cells alone."""
    cells = [
        cell
        for library in OURS[1:]
        for cell in backend_cells.cells_of_backend(registry.find_backend(library))
        if not is_single_process(cell)
    ]
    played = {name for cell in cells for name in select_cases(cell, 2, whole=False)}
    assert {name for name, case in CASES.items() if 2 in case.sizes} - played == set[str]()


def test_what_needs_four_ranks_is_played_once() -> None:
    """Among native's cells, to which it belongs."""
    native = backend_cells.cells_of_backend(registry.find_backend("native"))
    played = [name for cell in native for name in select_cases(cell, 4, whole=False)]
    assert sorted(played) == [
        "moments in bf16, copies",
        "muon, copies",
        "one parameter",
        "two copies",
        "two copies, fp64 norm",
        "two machines",
    ]
