"""One microbatch for several worlds, with trials that are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import pytest

from tests.support.tiny import CONFIG, Tiny
from unipar.errors import OutOfMemory
from unipar.launcher.micro_batch import choose
from unipar.launcher.micro_batch.choice import MicroTrial
from unipar.launcher.preparation.prepare import Prepared, prepare
from unipar.launcher.strategy_selection import settle_one_micro

MEMORY = {"total": 16, "micro": "auto", "memory": 1000, "headroom": 0}


class ToldTrials:
    """Trials whose outcomes are told: the largest size that fits, by world; and the plan's peaks."""

    most: Mapping[str, int]
    plans: Mapping[str, dict[int, int] | str]

    def __init__(self, code: object, worlds: Sequence[Any], limit: int, say: Callable[[str], None]) -> None:
        self.worlds, self.done, self.say = worlds, list[MicroTrial](), say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def plan(self) -> dict[str, dict[int, int] | str]:
        return {w.name: self.plans.get(w.name, "it needs values") for w in self.worlds}

    def fits(self, world: Any, micro: int) -> bool:
        fits = micro <= self.most[world.name]
        self.done.append(MicroTrial(world.name, micro, fits=fits))
        return fits

    def explain_lack(self, world: Any, planned: int | None) -> OutOfMemory:
        return OutOfMemory(f"nothing fits in {world.name}, {planned}")


def settle(
    monkeypatch: pytest.MonkeyPatch,
    most: dict[str, int],
    plans: dict[str, dict[int, int] | str],
    worlds: Sequence[int] = (2,),
) -> tuple[Prepared, list[tuple[str, int]]]:
    """Return what is settled for DDP and FSDP2, and the trials as world and size."""
    ToldTrials.most, ToldTrials.plans = most, plans
    monkeypatch.setattr(choose, "Trials", ToldTrials)
    prepared = prepare({**CONFIG, "batch": MEMORY}, Tiny)
    prepared, chosen = settle_one_micro(prepared, ("native/nothing", "native/parameters"), worlds)
    assert chosen is not None
    assert chosen.micro == prepared.source.config.batch.micro
    return prepared, [(trial.world, trial.micro) for trial in chosen.trials]


DDP, FSDP = "native/nothing on 2 ranks", "native/parameters on 2 ranks"


def test_the_smallest_of_all_strategies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy that comes later may need a smaller one, and those before it are asked again."""
    prepared, tried = settle(monkeypatch, {DDP: 4, FSDP: 2}, {DDP: {1: 300, 2: 500, 4: 900, 8: 1700}})
    assert prepared.source.config.batch.micro == 2
    assert tried == [(DDP, 4), (FSDP, 4), (FSDP, 2), (DDP, 2)]
    assert capsys.readouterr().err.splitlines() == [
        "batch.micro: auto: by the plan 4 fits in native/nothing on 2 ranks: 900 B of 1.0 KiB",
        "batch.micro: auto: native/parameters on 2 ranks is not planned, and tried from the smallest size on: it needs "
        "values",
        "batch.micro: auto: 2 of 8, after 4 trials; 4 needs 900 B in native/nothing on 2 ranks by the plan",
    ]


def test_sizes_that_are_possible_in_all_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On four ranks the share is four samples."""
    most = {DDP: 8, FSDP: 8, "native/nothing on 4 ranks": 8, "native/parameters on 4 ranks": 8}
    prepared, tried = settle(monkeypatch, most, {}, worlds=[2, 4])
    assert prepared.source.config.batch.micro == 4
    assert tried[-1] == ("native/parameters on 4 ranks", 4)


def test_a_strategy_in_which_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a strategy has no part in the choice, if another one has."""
    prepared, _ = settle(monkeypatch, {DDP: 0, FSDP: 8}, {})
    assert prepared.source.config.batch.micro == 8
    assert f"batch.micro: auto: nothing fits in {DDP}, which has no part in the choice" in capsys.readouterr().err
    with pytest.raises(OutOfMemory) as e:
        settle(monkeypatch, {DDP: 0, FSDP: 0}, {DDP: {1: 2000, 2: 3000}})
    assert str(e.value) == f"nothing fits in {DDP}, 2000"
