"""Ranks on several machines, played by threads: links between them, the watch over them, and what all do together."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rank_threads import PATIENCE, in_ranks, own_connection, serve_store
from unipar.distributed.meeting import links as links_module
from unipar.distributed.meeting import tree as tree_module
from unipar.distributed.meeting.links import Links
from unipar.distributed.meeting.machine_watch import MachineWatch
from unipar.distributed.meeting.neighbours import Neighbours
from unipar.distributed.meeting.roll_call import wait_for_key
from unipar.distributed.meeting.tree import RankTree, joined_runs
from unipar.distributed.meeting.world_session import Session
from unipar.distributed.place import Place
from unipar.distributed.world_machines import WorldMachine, WorldMachines
from unipar.errors import OutExists, WorldMismatch
from unipar.run_folder.error_file import is_consequence


@pytest.fixture
def store() -> dist.Store:
    return serve_store()


ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
THREE = WorldMachines(
    (
        WorldMachine("node0", ADDRESSES[0], (0, 3)),
        WorldMachine("node1", ADDRESSES[1], (1,)),
        WorldMachine("node2", ADDRESSES[2], (2, 4)),
    )
)


def neighbours(rank: int, machines: WorldMachines = THREE) -> Neighbours:
    return Neighbours.of_machine(machines, machines.index_of(rank))


def test_the_tree() -> None:
    """40 machines of two ranks: rank 0 is linked to 16 machines and its neighbour, and nobody to more."""
    machines = WorldMachines(tuple(WorldMachine(f"n{i}", "", (2 * i, 2 * i + 1)) for i in range(40)))
    near = {rank: neighbours(rank, machines) for rank in (0, 1, 2, 34, 35, 66)}
    assert near[0].ranks_below(0) == (1, *range(2, 34, 2))
    assert near[2].ranks_below(2) == (3, *range(34, 66, 2))
    assert near[35].ranks_below(35) == ()
    assert [one.rank_above(rank) for rank, one in near.items()] == [None, 0, 0, 2, 34, 4]
    many = WorldMachines(tuple(WorldMachine(f"n{i}", "", (i,)) for i in range(300)))
    assert [neighbours(rank, many).depth for rank in (0, 1, 16, 17, 272, 273)] == [0, 1, 1, 2, 2, 3]
    assert all(Neighbours.from_json(json.loads(json.dumps(one.to_json()))) == one for one in near.values())


def tree(store: dist.Store, rank: int) -> RankTree:
    made = RankTree(own_connection(store), rank, 5, neighbours(rank), 10.0)
    made.machines = THREE
    return made


def session(store: dist.Store, rank: int) -> Session:
    local = THREE.of(rank).ranks
    place = Place(rank=rank, size=5, local_rank=local.index(rank), local_size=len(local), launcher="x")
    return Session(place, store, THREE, tree(store, rank))


def watches(store: dist.Store, silence: float = 10.0) -> tuple[list[MachineWatch], dict[int, str]]:
    ended: dict[int, str] = {}

    def made(rank: int) -> MachineWatch:
        def end(cause: dict[str, Any]) -> None:
            ended[rank] = cause["message"]

        watch = MachineWatch(session(store, rank), silence, "launch.heartbeat", end)
        watch.step = lambda: 7
        return watch

    return in_ranks(5, made), ended


def tree_of(watch: MachineWatch) -> RankTree:
    return watch._tree  # pyright: ignore[reportPrivateUsage]


def cut(links: Links) -> None:
    """Close a rank's links as the system does it for a process that is killed; it says nothing more."""
    links._closing = True  # pyright: ignore[reportPrivateUsage]
    for link in links.all:
        link.connection.shutdown(socket.SHUT_RDWR)


def leave(made: list[MachineWatch]) -> None:
    for watch in made:
        watch.close()
    for watch in made:
        tree_of(watch).close()


def test_a_machine_is_lost(store: dist.Store) -> None:
    """All others learn which one; those that wait in a library's code are ended after a while."""
    made, ended = watches(store)
    cut(tree_of(made[1]).links)
    sentence = "node1 (127.0.0.2), rank 1, was lost after step 7: its connection was closed; its own log may say why"
    causes = in_ranks(5, lambda rank: made[rank].cause() if rank in (0, 2, 3) else None)
    assert [c and c["message"] for c in causes] == [sentence, None, sentence, sentence, None]
    until = time.monotonic() + PATIENCE
    while 4 not in ended and time.monotonic() < until:
        time.sleep(0.05)
    assert ended[4] == sentence
    assert not {0, 2, 3} & ended.keys()
    leave(made)


def test_rank_0_is_lost(store: dist.Store) -> None:
    """Each machine sees it by itself, and tells the ranks below."""
    made, _ = watches(store)
    cut(tree_of(made[0]).links)
    sentence = "node0 (127.0.0.1), rank 0, was lost after step 7: its connection was closed; its own log may say why"
    causes = in_ranks(5, lambda rank: made[rank].cause(), first=1)
    assert [c and c["message"] for c in causes] == [sentence] * 4
    leave(made)


def test_an_error_of_a_rank_reaches_all(store: dist.Store) -> None:
    """Through the first rank of its machine, and rank 0, which keeps it for its run folder."""
    made, _ = watches(store)
    made[4].fail({"kind": "WorkerFailed", "message": "rank 4 on node2 failed: ValueError: no", "error": "ValueError"})
    causes = in_ranks(5, lambda rank: made[rank].cause())
    assert [c and c["message"] for c in causes] == ["rank 4 on node2 failed: ValueError: no"] * 5
    assert [f["rank"] for f in made[0].failures] == [4]
    leave(made)


def test_the_end_is_no_loss(store: dist.Store) -> None:
    """Ranks that are done leave one after another, in any order, and nobody is blamed."""
    made, ended = watches(store)
    for rank in (0, 4, 1, 2, 3):
        made[rank].close()
        tree_of(made[rank]).close()
        time.sleep(0.02)
    assert ended == {}
    assert [w._cause for w in made] == [None] * 5  # pyright: ignore[reportPrivateUsage]


def test_a_stranger_is_not_a_rank(store: dist.Store) -> None:
    """Who connects without the word is sent away: a scanner of ports, or a rank of another run."""
    two = WorldMachines((WorldMachine("a", ADDRESSES[0], (0,)), WorldMachine("b", ADDRESSES[1], (1,))))

    def made(rank: int) -> Links:
        own = own_connection(store)
        if rank:
            port = int(wait_for_key(own, "links/0", time.monotonic() + PATIENCE, "no port").split()[0])
            for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "word": "x"}\n'):
                with socket.create_connection((ADDRESSES[0], port)) as stranger:
                    stranger.sendall(said)
                    with suppress(ConnectionResetError):
                        assert stranger.recv(1) == b""
        return Links(own, rank, neighbours(rank, two), 10.0)

    first, second = in_ranks(2, made)
    assert ([x.rank for x in first.children], second.parent and second.parent.rank) == ([1], 0)
    second.close()
    first.close()


def test_no_way_to_a_machine(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody answers at: the sentence has both machines, and both ways out."""
    monkeypatch.setattr(links_module, "CONNECT_SECONDS", 0.2)
    two = WorldMachines((WorldMachine("a", ADDRESSES[0], (0,)), WorldMachine("b", ADDRESSES[1], (1,))))
    store.set("links/0", "1 x")
    with pytest.raises(WorldMismatch) as e:
        Links(store, 1, neighbours(1, two), 10.0)
    assert str(e.value) == (
        "b (127.0.0.2) cannot connect to 127.0.0.1:1 on a (127.0.0.1) (Connection refused), though it has found the "
        "ranks there: a firewall between the two? gloo and NCCL connect at ports of the range "
        "net.ipv4.ip_local_port_range: open it between the machines, or choose another network (machines.interface)"
    )
    with pytest.raises(WorldMismatch) as e:
        Links(store, 0, neighbours(0, two), 10.0)
    assert str(e.value) == (
        f"{socket.gethostname()} was connected to by 0 of 1 ranks at an arbitrary port: a firewall? the other "
        "machines' logs say which could not"
    )


def test_rank_0_decides(store: dist.Store) -> None:
    """All get what it makes of all texts, in the order of ranks; long ones are sent compressed."""
    trees = in_ranks(5, lambda rank: tree(store, rank))
    assert in_ranks(5, lambda rank: trees[rank].decide("a", f"of {rank}", ",".join)) == ["of 0,of 1,of 2,of 3,of 4"] * 5
    long = "x" * 100_000
    assert in_ranks(5, lambda rank: trees[rank].decide("b", long, "".join)) == [5 * long] * 5
    assert sum(link.sent for link in trees[0].links.children) < 10_000
    for one in trees:
        one.close()


def test_what_rank_0_and_first_ranks_tell(store: dist.Store) -> None:
    """One text reaches all, or the ranks of one machine."""
    trees = in_ranks(5, lambda rank: tree(store, rank))
    assert in_ranks(5, lambda rank: trees[rank].tell("a", None if rank else "x")) == ["x"] * 5
    told = in_ranks(5, lambda rank: trees[rank].tell_machine("b", f"of {rank}" if THREE.leads(rank) else None))
    assert told == ["of 0", "of 1", "of 2", "of 0", "of 2"]
    assert [one._arrived for one in trees] == [{}] * 5  # pyright: ignore[reportPrivateUsage]
    for one in trees:
        one.close()


def test_equal_texts_travel_once(store: dist.Store) -> None:
    """Rank 0 gets one text of all ranks below, and how many have given it."""
    got: list[dict[str, Any]] = []
    trees = in_ranks(5, lambda rank: tree(store, rank))
    original = trees[2].links.send_up

    def send_up(message: dict[str, Any]) -> bool:
        got.append(message)
        return original(message)

    trees[2].links.send_up = send_up
    assert in_ranks(5, lambda rank: trees[rank].decide("a", "same", lambda texts: str(len(texts)))) == ["5"] * 5
    assert got == [{"round": "a", "ranks": {"same": [2, 1, 4, 1]}, "lost": ""}]
    assert joined_runs([4, 1, 2, 2, 0, 1, 7, 2]) == [0, 1, 2, 3, 7, 2]
    for one in trees:
        one.close()


def test_an_error_of_the_decision(store: dist.Store) -> None:
    """The error is raised on all, with its kind and sentence."""
    trees = in_ranks(5, lambda rank: tree(store, rank))

    def judge(texts: list[str]) -> str:
        raise OutExists(f"{texts[4]} is there")

    def decided(rank: int) -> str:
        try:
            return trees[rank].decide("a", f"of {rank}", judge)
        except OutExists as e:
            return str(e)

    assert in_ranks(5, decided) == ["of 4 is there"] * 5
    for one in trees:
        one.close()


def outcome(one: RankTree, patience: float = PATIENCE) -> str:
    try:
        return one.decide("late", "x", "".join, patience)
    except WorldMismatch as e:
        return str(e)


def test_a_rank_that_does_not_answer(store: dist.Store) -> None:
    """The rank is named, by the rank that waits for all."""
    trees = in_ranks(5, lambda rank: tree(store, rank))
    told = in_ranks(4, lambda rank: outcome(trees[rank], 0.3))
    assert told == ["rank 0 waited 0.3 s for rank 4, which ended or hang"] * 4
    for one in trees:
        one.close()


def test_rank_0_does_not_answer(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank below says for whom it waits, to those below it as well."""
    monkeypatch.setattr(tree_module, "_SECONDS_TO_HEAR", 0.0)
    trees = in_ranks(5, lambda rank: tree(store, rank))
    told = in_ranks(3, lambda rank: outcome(trees[rank * 2], 0.3 if rank == 1 else PATIENCE), first=1)
    assert told == ["rank 2 waited 0.3 s for rank 0, which has ended or hangs; its log may say why"] * 2
    for one in trees:
        one.close()


def test_a_rank_that_has_ended(store: dist.Store) -> None:
    """All are told at once, not when their patience ends; who has lost rank 0 tells it to those below."""
    trees = in_ranks(5, lambda rank: tree(store, rank))
    cut(trees[4].links)
    began = time.monotonic()
    told = in_ranks(4, lambda rank: outcome(trees[rank]))
    lost = "was lost before the first step: its connection was closed; its own log may say why"
    assert told == [f"node2 (127.0.0.3), rank 4, {lost}"] * 4
    cut(trees[0].links)
    told = in_ranks(4, lambda rank: outcome(trees[rank]), first=1)
    assert told == [f"node0 (127.0.0.1), rank 0, {lost}"] * 3
    assert time.monotonic() - began < PATIENCE
    for one in trees:
        one.close()


def test_a_rank_that_cannot_be_linked(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise its sentence, those that are linked as well."""
    monkeypatch.setattr(links_module, "CONNECT_SECONDS", 0.5)

    def connect(*given: Any, **more: Any) -> socket.socket:
        if given[0][0] == ADDRESSES[2]:
            raise TimeoutError
        return create_connection(*given, **more)

    create_connection = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", connect)

    def linked(rank: int) -> str:
        try:
            one = RankTree(own_connection(store), rank, 5, neighbours(rank), 10.0)
        except WorldMismatch as e:
            return str(e).partition(" on ")[0]
        try:
            return one.decide("linked", "", "".join, PATIENCE)
        except WorldMismatch as e:
            return str(e).partition(" on ")[0]
        finally:
            one.close()

    told = in_ranks(5, linked)
    assert len(set(told)) == 1
    assert told[0].startswith("node2 (127.0.0.3) cannot connect to 127.0.0.3:")


def test_nobody_waits_once_the_world_has_failed(store: dist.Store) -> None:
    """Under a watch a lost rank ends every round, with an error that is known as the consequence of another's."""
    made, _ = watches(store)
    cut(tree_of(made[2]).links)
    told = in_ranks(2, lambda rank: outcome(tree_of(made[rank])))
    assert [text.partition("part of ")[2] for text in told] == ["'late': connection closed by peer"] * 2
    assert all(map(is_consequence, told))
    leave(made)


def test_what_comes_before_a_watch(store: dist.Store) -> None:
    """A failure that is told at once reaches a watch that begins later; the next launch knows nothing of it."""
    sessions = in_ranks(5, lambda rank: session(store, rank))
    first = MachineWatch(sessions[1], 10.0, "launch.heartbeat", lambda _: None)
    first.fail({"kind": "WorkerFailed", "message": "rank 1 failed"})
    above = sessions[0].tree
    assert above is not None
    until = time.monotonic() + PATIENCE
    while not above._early and time.monotonic() < until:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.01)
    others = [MachineWatch(sessions[r], 10.0, "launch.heartbeat", lambda _: None) for r in (0, 2, 3, 4)]
    made = [others[0], first, *others[1:]]
    assert [(c := watch.cause()) and c["message"] for watch in others] == ["rank 1 failed"] * 4
    for watch in (first, *others):
        watch.close()
    assert in_ranks(5, lambda rank: outcome(tree_of(made[rank]))) == ["xxxxx"] * 5
    again = [MachineWatch(one, 10.0, "launch.heartbeat", lambda _: None) for one in sessions]
    told = in_ranks(5, lambda rank: tree_of(again[rank]).decide("more", "y", "".join))
    assert told == ["yyyyy"] * 5
    leave(again)


def test_a_rank_says_that_it_waits(store: dist.Store) -> None:
    """As soon as another is late, and again and again."""
    trees = in_ranks(5, lambda rank: tree(store, rank))
    times: list[float] = []
    began = time.monotonic()

    def decide(rank: int) -> str:
        if rank == 4:
            time.sleep(1.2)
        return trees[rank].decide("a", "x", "".join, waiting=lambda: times.append(rank) if rank == 2 else None)

    assert in_ranks(5, decide) == ["xxxxx"] * 5
    assert (len(times) >= 3, time.monotonic() - began < PATIENCE) == (True, True)
    for one in trees:
        one.close()
