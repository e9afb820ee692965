"""Copies of the state over machines: which ranks split one, and what is refused."""

from __future__ import annotations

import pytest

from unipar.distributed.copies_by_machine import copies_by_machine
from unipar.distributed.mesh import Mesh
from unipar.distributed.world_machines import WorldMachines
from unipar.errors import ConfigError


def placed(machines: str) -> WorldMachines:
    """Ranks on machines of these letters, in the order of ranks."""
    names = [f"node-{letter}" for letter in machines]
    return WorldMachines.of_ranks(machines, names, [f"10.0.0.{ord(letter) - 96}" for letter in machines])


@pytest.mark.parametrize(
    ("machines", "rows"),
    [
        ("abababab", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("aaaabbbb", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("abbacdcd", [[0, 3], [1, 2], [4, 6], [5, 7]]),
        ("aaaa", [[0, 1, 2, 3]]),
        ("a", [[0]]),
    ],
)
def test_the_ranks_of_a_machine_split_a_copy(machines: str, rows: list[list[int]]) -> None:
    """Wherever they are, whatever their numbers."""
    copies = copies_by_machine(Mesh.of(0, len(machines)), placed(machines))
    assert copies.rows == rows
    assert (copies.copies, copies.shards) == (len(rows), len(rows[0]))


@pytest.mark.parametrize(
    ("axes", "machines", "shape", "ranks"),
    [
        ({"tensor": 2}, "aaaabbbb", (1, 2, 2, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"tensor": 2}, "aabbaabb", (1, 2, 2, 2), [0, 1, 4, 5, 2, 3, 6, 7]),
        ({"context": 2}, "aabbaabb", (1, 2, 4, 1), [0, 1, 4, 5, 2, 3, 6, 7]),
        ({"context": 2}, "aabb", (1, 2, 2, 1), [0, 1, 2, 3]),
        ({"pipeline": 2}, "abababab", (2, 2, 2, 1), [0, 2, 1, 3, 4, 6, 5, 7]),
        ({"pipeline": 2}, "aaaabbbb", (2, 1, 4, 1), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_beside_other_axes(axes: dict[str, int], machines: str, shape: tuple[int, ...], ranks: list[int]) -> None:
    """Ranks by stage, copy, shard and part of the matrices; ranks that split a sequence split a copy, too."""
    copies = copies_by_machine(Mesh.of(0, len(machines), **axes), placed(machines))
    assert copies.shape == shape
    assert list(copies.ranks) == ranks


INSTEAD = "leave shard_over out, so that all ranks split one copy"


@pytest.mark.parametrize(
    ("axes", "machines", "sentence"),
    [
        (
            {},
            "aab",
            "parallel.shard_over: machine: node-a (10.0.0.1) has 2 ranks, node-b (10.0.0.2) has 1 rank, and copies can "
            f"be split only over equal numbers: start as many ranks on each machine, or {INSTEAD}",
        ),
        (
            {},
            "abc",
            "parallel.shard_over: machine: there is nothing to split, because each of 3 machines has one rank that "
            f"trains on its own part of the data; {INSTEAD}, or say parallel.shard: nothing",
        ),
        (
            {"tensor": 2},
            "aabb",
            "parallel.shard_over: machine: there is nothing to split, because each of 2 machines has one rank that "
            f"trains on its own part of the data; {INSTEAD}, or say parallel.shard: nothing",
        ),
        (
            {"tensor": 2},
            "abab",
            "parallel.shard_over: machine wants the ranks of each tensor group on one machine, and ranks 0 and 1 are "
            "on node-a (10.0.0.1) and node-b (10.0.0.2): start the ranks of a machine one after another (block "
            "placement), a multiple of tensor 2 on each",
        ),
        (
            {"context": 2},
            "abab",
            "parallel.shard_over: machine wants the ranks of each context group on one machine, and ranks 0 and 1 are "
            "on node-a (10.0.0.1) and node-b (10.0.0.2): start the ranks of a machine one after another (block "
            "placement), a multiple of context 2 on each",
        ),
        (
            {"pipeline": 2},
            "aaabbbccc" + "d" * 3,
            "parallel.shard_over: machine: the stages of pipeline 2 begin and end in the middle of machines ({}): "
            "start as many ranks on each machine as whole stages need, or as divide the ranks of one",
        ),
    ],
)
def test_refused(axes: dict[str, int], machines: str, sentence: str) -> None:
    """With the machines, the numbers and the way out."""
    if axes.get("pipeline"):
        machines = "aaaabbbbcccc"  # stages of 6 ranks
        sentence = sentence.format(placed(machines))
    with pytest.raises(ConfigError) as caught:
        copies_by_machine(Mesh.of(0, len(machines), **axes), placed(machines))
    assert str(caught.value) == sentence
