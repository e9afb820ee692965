"""Which cases are played in which strategy: for `make conformance` all, for `make test` each a few times."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

from tests.conformance.cases import (
    BITS,
    CASES,
    COMPILED,
    EVERYWHERE,
    EXPERT_CASES,
    MAIN_CASES,
    MESH_CASES,
    MESH_EVERYWHERE,
    MESH_STRATEGIES,
    OURS,
    SHORT_CASES,
    SIZES_ONLY_VARIANT,
    THIN,
    VARIANTS,
    WHOLE_ALONE,
)
from tests.conformance.marks import MARKS
from unipar.backend import offered_strategies as backend_strategies
from unipar.backend import registry
from unipar.backend.offered_strategies import is_single_process
from unipar.config import Strategy


def select_cases(strategy: Strategy, size: int, *, whole: bool) -> list[str]:
    """Return the cases of a strategy in a world of this size: for `make conformance` all.

    `make test` plays, in worlds of two, each case under some libraries (compiled ones as COMPILED says), each mark
    once, and what every strategy must do; in worlds of four, once what needs four ranks. A stranger's strategies play
    all cases in worlds of two, some in others.
    """
    names: Collection[str] = CASES
    if str(strategy) in WHOLE_ALONE and not whole:
        names = ()
    elif strategy.axes.split and not whole:
        copies = 2 if strategy.shard == "parameters" else 1  # of which each keeps a part of the parameters
        if str(strategy) in MESH_STRATEGIES[:3] and size == 2:
            turn = MESH_STRATEGIES.index(str(strategy))
            names = [name for i, name in enumerate(MESH_CASES) if name in MESH_EVERYWHERE or i % 3 == turn]
        elif size == copies * strategy.axes.fewest_ranks:
            names = _short_cases(MESH_STRATEGIES.index(str(strategy)), 2 if size == 2 else 1)
            names |= set(EXPERT_CASES.get(str(strategy), ()))
        else:
            names = ()
    elif not whole and size == 2:
        names = CASES if strategy.backend not in OURS else _covering(strategy)
    elif not whole and size == 1:
        thin = _short_cases(THIN.index(str(strategy)), 2) if str(strategy) in THIN else ()
        names = MAIN_CASES if strategy.backend not in OURS[1:] else thin
    elif not whole:
        names = SHORT_CASES if strategy.backend not in OURS else _cases_for_four_ranks(strategy)
    return [name for name, case in CASES.items() if name in names and case.on(strategy)]


def _cases_for_four_ranks(strategy: Strategy) -> set[str]:
    """Return the cases that need four ranks, and are this strategy's: they go round among strategies."""
    names: set[str] = set()
    for turn, case in enumerate(case for case in CASES.values() if case.sizes == (4,)):
        able = [c for c in backend_strategies.strategies_of_backend(registry.find_backend("native")) if case.on(c)]
        if able[turn % len(able)] == strategy:
            names.add(case.name)
    return names


def _short_cases(turn: int, count: int) -> set[str]:
    """Return what every strategy must do, and so many of the other short cases: they go round among strategies."""
    others = [name for name in SHORT_CASES if name not in EVERYWHERE]
    return {*EVERYWHERE, *(others[(turn + i) % len(others)] for i in range(count))}


def _covering(strategy: Strategy) -> set[str]:
    """Return this strategy's part of the cases in worlds of two, and what every strategy must do."""
    always = (
        EVERYWHERE if strategy.variant == SIZES_ONLY_VARIANT else (*BITS, *EVERYWHERE[1:])
    )  # BITS have four microbatches
    return {*always, *_share_out(strategy.backend).get(strategy, ())}


@cache
def libraries_of(name: str) -> Collection[str]:
    """Return the libraries under which `make test` plays a case in worlds of two.

    Main cases are played under each; a variant of a case under one, by turns; what compiles where COMPILED says; others
    under native, if they can be, and under one more or none, by turns.
    """
    libraries = OURS[1:]
    if "compile" in CASES[name].more.get("model", {}):
        return {strategy.partition("/")[0] for strategy, names in COMPILED.items() if name in names}
    if name in MAIN_CASES:
        return libraries
    if name in VARIANTS:
        return (libraries[VARIANTS.index(name) % len(libraries)],)
    strategies = {
        library: backend_strategies.strategies_of_backend(registry.find_backend(library)) for library in libraries
    }
    first, *more = (
        library for library in libraries if any(CASES[name].on(strategy) for strategy in strategies[library])
    )
    turn = list(CASES).index(name)
    return (first,) if turn % 2 or not more else (first, more[turn // 2 % len(more)])


@cache
def _share_out(backend: str) -> Mapping[Strategy, Collection[str]]:
    """Return each strategy's cases in worlds of two: they go round among strategies without a mark for them."""
    every = backend_strategies.strategies_of_backend(registry.find_backend(backend))
    shares: dict[Strategy, list[str]] = {strategy: [] for strategy in every if not is_single_process(strategy)}
    turn = 0
    for name, case in CASES.items():
        if 2 in case.sizes and (backend in libraries_of(name) or backend not in OURS):
            here = [c for c in shares if case.on(c)]
            able = [c for c in here if not any(mark.fits(c, name, 2) for mark in MARKS)] or here
            if "compile" in case.more.get("model", {}):
                able = [c for c in able if name in COMPILED.get(str(c), ())]
            if able:
                shares[able[turn % len(able)]].append(name)
            turn += 1
    for mark in MARKS:
        both = ((c, name) for c in shares for name, case in CASES.items() if 2 in case.sizes and mark.fits(c, name, 2))
        first = next(both, None)
        if first is not None:
            shares[first[0]].append(first[1])
    return shares
