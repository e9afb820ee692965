"""Every strategy trains to the numbers of one process, or is marked with who, what it raises, and why."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.conformance.cases import CASES, OURS, SIZES, Case, blocks_for, experts_for
from tests.conformance.conftest import CaseResult, StrategyRunner
from tests.conformance.generation import Generating
from tests.conformance.local import train_locally_by_hand
from tests.conformance.marks import FSDP2, MARKS
from tests.conformance.plain import Result
from tests.conformance.selection import libraries_of, select_cases
from unipar.backend import offered_strategies as backend_strategies
from unipar.backend import registry
from unipar.backend.offered_strategies import is_single_process
from unipar.config import Strategy
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
"""Strategies that add the same numbers in the same order: their results are equal to the last bit."""


EIGHT_CASES = ("ragged last batch", "token weights, ragged", "tied weights", "dropout", "state out and in")
"""Cases that are played on eight ranks, once."""


def test_agrees(hall: StrategyRunner, strategy: Strategy, size: int, case: str) -> None:
    """Losses, norms, parameters and evaluations are those of one process, within the stated tolerance."""
    wanted = CASES[case]
    if wanted.error:
        with pytest.raises(NonFinite) as caught:
            hall.result(strategy, size, case)
        leads = size - strategy.axes.tensor * strategy.axes.context  # the last share's rank that counts
        assert str(caught.value).startswith(f"{wanted.error}{leads}: ")
        return
    near = wanted.tolerance
    if wanted.local:
        got, by_hand = hall.result(strategy, size, case), train_locally_by_hand(wanted, size)
        assert got.losses == pytest.approx(by_hand["losses"], abs=near.loss, rel=0)
        assert got.norms[0] != got.norms[1], "the ranks took one step together"
        assert near.params is not None
        assert all(torch.allclose(t, by_hand["params"][n], atol=near.params, rtol=0) for n, t in got.params.items())
        return
    got = hall.result(strategy, size, case)
    one = hall.plain(case, size, blocks_for(strategy), experts_for(strategy))
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
    """Averages are those of one process over this strategy's weights to the last bit, and near those of one process.

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
def test_agrees_on_eight_ranks(hall: StrategyRunner, case: str) -> None:
    """Two shares of the data, two stages and two parts of each matrix, parameters split over the shares by FSDP2."""
    strategy = Strategy.parse("native/parameters+tensor2+pipeline2")
    hall.wanted.setdefault((strategy, 8), list(EIGHT_CASES))
    test_agrees(hall, strategy, 8, case)


def test_closed_by_default(hall: StrategyRunner) -> None:
    """Whatever a library opens in our worlds listens on loopback alone, and nothing is left in /dev/shm."""
    for (strategy, size), names in hall.wanted.items():
        if (strategy, size) not in hall.listens:
            hall.result(strategy, size, names[0])
        elsewhere = [a for a in hall.listens[strategy, size] if a != "0100007F"]  # 127.0.0.1
        assert (str(strategy), size, elsewhere) == (str(strategy), size, [])
        assert hall.listens[strategy, size] or size == 1
        assert (str(strategy), size, hall.left_in_shared_memory[strategy, size]) == (str(strategy), size, set())


@pytest.mark.parametrize(
    ("name", "strategies"), [(n, strategies) for n, classes in BITS.items() for strategies in classes]
)
def test_bits(hall: StrategyRunner, name: str, strategies: list[str]) -> None:
    """At world 2 in fp32, with the norm in fp64 and neither fused nor foreach, a class of strategies has one result."""
    there = [
        hall.result(Strategy.parse(c), 2, name)
        for c in strategies
        if name in hall.wanted.get((Strategy.parse(c), 2), ())
    ]
    if len(there) < 2:
        pytest.skip("fewer than two strategies of this class are played")
    first, *others = there
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(t, first.params[n]) for n, t in other.params.items())


def test_sizes_are_played() -> None:
    """The suite's worlds: one process, two, and four."""
    assert SIZES == (1, 2, 4)


@pytest.mark.parametrize("library", OURS[1:])
def test_what_make_test_plays_covers_all(library: str) -> None:
    """In worlds of two each library plays each case that is its own, and each of its strategies three or more."""
    strategies = [
        strategy
        for strategy in backend_strategies.strategies_of_backend(registry.find_backend(library))
        if not is_single_process(strategy)
    ]
    by_strategy = {
        strategy: {name for name in select_cases(strategy, 2, whole=False) if 2 in CASES[name].sizes}
        for strategy in strategies
    }
    assert min(map(len, by_strategy.values())) >= 3
    wanted = {
        name for name, case in CASES.items() if 2 in case.sizes and any(case.on(strategy) for strategy in strategies)
    }
    others = {name for name in wanted if library not in libraries_of(name)}
    marked = {name for mark in MARKS for name in others if any(mark.fits(strategy, name, 2) for strategy in strategies)}
    assert set[str]().union(*by_strategy.values()) - marked == wanted - others


def test_every_case_is_played_under_some_library() -> None:
    """Under native at least, or it is a variant, or it compiles, or it is for another library's strategies alone."""
    strategies = [
        strategy
        for library in OURS[1:]
        for strategy in backend_strategies.strategies_of_backend(registry.find_backend(library))
        if not is_single_process(strategy)
    ]
    played = {name for strategy in strategies for name in select_cases(strategy, 2, whole=False)}
    assert {name for name, case in CASES.items() if 2 in case.sizes} - played == set[str]()


def test_what_needs_four_ranks_is_played_once() -> None:
    """Among native's strategies, to which it belongs."""
    native = backend_strategies.strategies_of_backend(registry.find_backend("native"))
    played = [name for strategy in native for name in select_cases(strategy, 4, whole=False)]
    assert sorted(played) == [
        "moments in bf16, copies",
        "muon, copies",
        "one parameter",
        "two copies",
        "two copies, fp64 norm",
        "two machines",
    ]
