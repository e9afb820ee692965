"""The arithmetic of `make bench`, and what its loops by hand train."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint_write import Arms, measure_arms
from benchmarks.memory import result_row, select_rows
from benchmarks.mesh_time import compare_parameters, measure_way
from benchmarks.overhead import STRATEGIES
from benchmarks.peers import PEERS, Peer, format_row, measure_pairs
from benchmarks.peers_inside import TRAININGS
from benchmarks.timing import interleaved, interval, time_ratio
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.backend import offered_strategies as strategies
from unipar.launcher.processes.group import WorkerGroup
from unipar.memory.account import PhasePeak

pytestmark = pytest.mark.forked


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (12, 3, 10), (20, 6, 15), (100, 40, 61)])
def test_an_interval_holds_the_median_nineteen_times_in_twenty(count: int, low: int, high: int) -> None:
    """By the binomial: of 12 values the third and the tenth, as tables of order statistics have it."""
    found = interval([float(i) for i in range(count, 0, -1)])
    assert (found.middle, found.low, found.high, found.rounds) == ((count + 1) / 2, low, high, count)


def test_loops_take_turns_and_none_is_always_first() -> None:
    """Every round begins with the next one."""
    said: list[str] = []
    ticks = itertools.count()
    loops = {name: lambda name=name: said.append(name) for name in "abc"}
    times = interleaved(loops, 3, 2, lambda: float(next(ticks)))
    assert "".join(said) == "aabbcc" + "bbccaa" + "ccaabb"
    assert times == {"a": [0.5] * 3, "b": [0.5] * 3, "c": [0.5] * 3}


def test_a_ratio_stops_when_its_interval_is_narrow_or_time_is_up() -> None:
    """Two equal loops of real work: at least the least number of pairs, and near 1."""

    def work() -> int:
        return sum(range(20_000))

    found = time_ratio(work, work, half=0.5, least=12, seconds=5)
    assert found.rounds == 12
    assert 0.5 < found.middle < 2
    assert time_ratio(work, work, half=0.0, least=2, seconds=0).rounds == 2


def test_rows_of_the_memory_table_are_what_was_asked_for() -> None:
    """By model, precision, ranks and strategy; a strategy that refuses a precision has none."""
    rows = [
        name for name, _ in select_rows(["50M", "bf16-mixed", "bf16-master", "2", "native/nothing", "native/optimizer"])
    ]
    assert rows == [
        ("50M", "bf16-mixed", "2", "native/nothing"),
        ("50M", "bf16-mixed", "2", "native/optimizer"),
        ("50M", "bf16-master", "2", "native/optimizer"),
    ]
    assert len({name[:3] for name, _ in select_rows(["single"])}) == 8  # it has no bf16-master


@pytest.mark.parametrize(
    ("parameters", "rest", "shown"),
    [
        (990, 10, ("x", "0.0", "0.0", "1.00 % in update", "")),
        (970, 30, ("x", "0.0", "0.0", "3.00 % in update", "MISSED")),
        (1000, 0, ("x", "0.0", "0.0", "0.00 % in update", "")),
        (1010, -10, ("x", "0.0", "0.0", "-1.00 % in update", "TWICE")),
    ],
)
def test_a_row_of_the_memory_table_tells_what_is_named_twice(
    parameters: int, rest: int, shown: tuple[str, ...]
) -> None:
    """Parts add up by arithmetic, whatever was counted: what is named alone must not exceed the peak, be it by 1 %."""
    phase = PhasePeak(name="update", peak=1000, held={"parameters": parameters, "unattributed": rest})
    assert result_row(("x",), [phase]) == (shown, shown[-1] == "")


def test_every_strategy_has_a_loop_by_hand() -> None:
    """Left out: what is another strategy with other settings, and one process without a library."""
    left = {str(strategy) for strategy in strategies.expand_strategy_patterns(("*",))} - set(STRATEGIES)
    assert {strategy for strategy in left if not strategy.endswith("+library")} == {"native/nothing+dp", "single"}


@pytest.mark.parametrize(
    "models",
    [
        {
            "accelerate/nothing": "DistributedDataParallel",
            "accelerate/gradients": "FSDP2, 3 groups, 0 resharded",
            "accelerate/parameters": "FSDP2, 3 groups, 2 resharded",
        },
        pytest.param(
            {
                "accelerate/optimizer+zero": "DeepSpeedEngine 1",
                "accelerate/gradients+zero": "DeepSpeedEngine 2",
                "accelerate/parameters+zero": "DeepSpeedEngine 3",
            },
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["torch", "zero"],
)
@pytest.mark.usefixtures("forked")
def test_like_is_held_against_like(models: dict[str, str], tmp_path: Path) -> None:
    """Both loops wrap the model in the same way, and their losses are the same bits."""
    (tmp_path / "strategies").write_text(" ".join(models), "utf-8")
    with WorkerGroup(tmp_path, 1, "tests.support.loops_inside:run", environment=PYTHONPATH_VARIABLE) as workers:
        workers.wait()
    for strategy, said in json.loads((tmp_path / "said.json").read_text("utf-8")).items():
        ours, theirs = said["losses"]
        assert ours == theirs
        assert ours[3] < ours[0]
        assert said["models"] == [models[strategy], models[strategy]]


def test_every_peer_has_a_training_and_a_limit() -> None:
    """Where the peer's default is a fused optimizer the limit is its own time, elsewhere 0.92 of it."""
    limits = {peer.name: peer.bar for group in PEERS for peer in group}
    assert {"unipar", *limits} == set(TRAININGS)
    assert limits["HF Trainer"] == 1.0
    assert limits["DDP"] == limits["Accelerate"] == limits["Fabric"] == limits["Lightning"] == 0.92


def test_a_row_of_peers_tells_whether_the_limit_is_met() -> None:
    """Of three ratios 0.8, 0.9 and 1.2 the median is 0.9."""
    ours = [{"seconds": s, "cpu": 1.0} for s in (0.8, 0.9, 1.2)]
    row = {"strategy": "native/nothing", "bar": 0.92, "unipar": ours, "peer": [{"seconds": 1.0, "cpu": 2.0}] * 3}
    shown = ("DDP", "native/nothing", "900", "1000", "0.900 [0.800..1.200]", "0.92 met", "0.500")
    assert format_row("DDP", row) == shown
    assert format_row("DDP", row | {"bar": 0.89})[5] == "0.89 MISSED"
    assert format_row("DDP", {"failed": "rank 0 ended"}) == ("DDP", "failed: rank 0 ended")


def test_peers_and_unipar_train_in_turns() -> None:
    """Two ranks each, on a small model: times of every round, and nearly the same loss after as many steps."""
    small = {"task.args": {"layers": 1, "width": 32, "heads": 2, "context": 16}, "train.optimizer.lr": 3e-3}
    small |= {
        "batch.total": 128,
        "batch.micro": 64,
    }  # each side logs the loss of one batch, of text that depends on Python
    row = measure_pairs([Peer("DDP", "native/nothing", fused=False)], 4, small)["DDP"]
    assert len(row["unipar"]) == len(row["peer"]) == 4
    assert all(took["seconds"] > 0 and took["cpu"] > 0 for took in row["unipar"] + row["peer"])
    ours, theirs = row["losses"]
    assert ours < 4.5  # 4.6 is the loss of a uniform guess
    assert ours == pytest.approx(theirs, rel=0.1)


@pytest.mark.parametrize("way", ["tensor 2", pytest.param("pipeline 2, 1f1b", marks=pytest.mark.sweep)])
@pytest.mark.usefixtures("forked")
def test_a_mesh_by_hand_trains_the_same_parts_as_unipar(way: str) -> None:
    """Each rank compares its parameters with those of the script after three steps, before anything is timed."""
    told = measure_way(way, 2, {"layers": 2, "width": 16, "heads": 2, "context": 16})
    assert [set(rank["times"]) for rank in told] == [{"unipar", "by hand", "by hand, again"}] * 2
    assert all(len(times) == 2 for rank in told for times in rank["times"].values())


def test_other_parameters_than_those_of_the_script_are_seen() -> None:
    """Another value, and another set of names."""
    one = {"a": torch.zeros(2)}
    compare_parameters(one, {"a": torch.full((2,), 1e-6)})
    with pytest.raises(AssertionError, match=r"a is off by 1\.0e-04"):
        compare_parameters(one, {"a": torch.full((2,), 1e-4)})
    with pytest.raises(AssertionError, match="b"):
        compare_parameters(one, {**one, "b": one["a"]})


def test_a_checkpoint_is_measured_beside_plain_writing(tmp_path: Path) -> None:
    """Every arm writes or reads the same bytes, and the plain one's share is 1."""
    arms = Arms(tmp_path, tensors=2, elements=1000)
    found = measure_arms(arms, 2)
    assert list(found) == [
        "plain write, fsync",
        "shard with hash",
        "checkpoint",
        "torch.save, fsync",
        "plain read",
        "verify",
    ]
    assert found["plain write, fsync"]["share"]["middle"] == found["plain read"]["share"]["middle"] == 1
    assert all(told["rate"]["middle"] > 0 for told in found.values())
    assert (tmp_path / "plain").stat().st_size == arms.bytes == 8000
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
