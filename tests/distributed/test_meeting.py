"""Ranks on several machines, played by threads that share a store: roll call, links, and the watch over them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from unipar.distributed.addresses import (
    address_of_interface,
    first_host,
    interface_of,
    own_address_toward,
    port_of_job,
    resolve_host,
    with_port,
)
from unipar.distributed.machines import WorldMachine, WorldMachines, name_ranks
from unipar.distributed.meeting import links as links_module
from unipar.distributed.meeting import rendezvous
from unipar.distributed.meeting.links import Links, rank_above, ranks_below
from unipar.distributed.meeting.roll_call import Presence, RollCall, call_roll, decide_together, wait_for_key
from unipar.distributed.meeting.session import Session
from unipar.distributed.meeting.watch import MachineWatch
from unipar.distributed.place import Place
from unipar.errors import OutExists, WorldMismatch

T = TypeVar("T")
PATIENCE = 20.0


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)


def own_connection(store: dist.Store) -> dist.Store:
    """Return the store as another process would have it: calls over one connection wait for each other."""
    assert isinstance(store, dist.TCPStore)
    return dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=PATIENCE))


def in_ranks(size: int, function: Callable[[int], T], first: int = 0) -> list[T]:
    """Return what a function returns on each rank, each in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(first, size)))


def presence(rank: int, per: int = 2, restarts: int = 0) -> Presence:
    machine = rank // per
    return Presence(f"key{machine}", f"node{machine}", f"10.0.0.{machine + 1}", restarts)


def roll(
    store: dist.Store, rank: int, size: int, mine: Presence | None = None, patience: float = PATIENCE
) -> RollCall | str:
    try:
        return call_roll(own_connection(store), rank, size, mine or presence(rank), patience, lambda _: "10.0.0.99")
    except WorldMismatch as e:
        return str(e)


def test_the_port_is_another_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and says nothing, for which torch waits without a limit."""
    monkeypatch.setattr(rendezvous, "_FOR_AN_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = Place(rank=1, size=2, local_rank=0, local_size=1, launcher="x", address=("127.0.0.1", port))
        with pytest.raises(WorldMismatch) as e:
            rendezvous.open_store(place, timedelta(seconds=0.1))
    assert str(e.value) == (
        f"rank 1 on {socket.gethostname()} is connected to 127.0.0.1:{port}, but what listens there has not answered "
        "within 0.1 s (launch.meet): it is not rank 0 but another program; give the launcher another port, or set "
        "MASTER_ADDR and MASTER_PORT yourself"
    )


def test_all_learn_who_is_where(store: dist.Store) -> None:
    """Four ranks on two machines: one session, one table, the largest number of restarts that any was told."""
    told = in_ranks(4, lambda rank: roll(store, rank, 4, presence(rank, restarts=2 if rank == 3 else 0)))
    assert len(set(told)) == 1
    assert isinstance(told[0], RollCall)
    assert str(told[0].machines) == "node0 (10.0.0.1): ranks 0 and 1; node1 (10.0.0.2): ranks 2 and 3"
    assert told[0].restarts == 2


def test_cyclic_and_uneven_placement() -> None:
    """Five ranks dealt to two machines: who leads, and each one's place on its machine."""
    machines = WorldMachines.of_ranks(list("ababa"), list("xyxyx"), ["1", "2"] * 2 + ["1"])
    assert [m.ranks for m in machines.all] == [(0, 2, 4), (1, 3)]
    assert [machines.leads(r) for r in range(5)] == [True, True, False, False, False]
    assert [machines.local_rank(r) for r in range(5)] == [0, 0, 1, 1, 2]
    assert WorldMachines.from_json(machines.to_json()) == machines


def test_ranks_in_words() -> None:
    """One, a run of several, some, and many."""
    assert [name_ranks(r) for r in ([3], [0, 1, 2], [0, 2, 5], [1, 2], list(range(0, 20, 2)))] == [
        "rank 3", "ranks 0 to 2", "ranks 0, 2 and 5", "ranks 1 and 2", "ranks 0, 2, 4, 6, 8, 10 and 4 more",
    ]  # fmt: skip


def test_an_earlier_attempt_is_not_joined(store: dist.Store) -> None:
    """torchrun keeps its store over restarts: letters and answers of the first attempt mean nothing to the second."""
    first = in_ranks(2, lambda rank: roll(store, rank, 2))
    store.set("letters/3", json.dumps({"rank": 1, "word": "dead", "presence": vars(presence(1))}))
    store.add("letters", 1)  # of a rank that was killed before it was answered
    second = in_ranks(2, lambda rank: roll(store, rank, 2))
    assert isinstance(first[0], RollCall)
    assert isinstance(second[0], RollCall)
    assert second[0] == second[1]
    assert (first[0].session == second[0].session, first[0].restarts, second[0].restarts) == (False, 0, 1)


def test_who_is_missing(store: dist.Store) -> None:
    """Those who came end together, with one sentence."""
    told = in_ranks(3, lambda rank: roll(store, rank, 4, presence(rank, per=1), patience=0.5))
    assert set(told) == {
        "3 of 4 ranks have met within 0.5 s (launch.meet), and rank 3 is missing (here are node0: rank 0; node1: rank "
        "1; node2: rank 2): was the launcher started on every machine, and is there a way from each to rank 0's (a "
        "firewall)?"
    }


def test_rank_0_never_came(store: dist.Store) -> None:
    """The store may be that of an agent, which is there without rank 0."""
    assert roll(store, 1, 2, patience=0.3) == (
        "rank 1 on node0 has reached the meeting point and waited 0.3 s (launch.meet) for rank 0: it has ended, or was "
        "never started"
    )


def test_own_name_on_loopback(store: dist.Store) -> None:
    """On Debian a machine's own name is 127.0.1.1: rank 0's machine is told by its way to another one."""
    here = Presence("a", "node0", "127.0.1.1")
    told = in_ranks(3, lambda rank: roll(store, rank, 3, here if rank < 2 else Presence("b", "node1", "10.0.0.2")))
    assert isinstance(told[2], RollCall)
    assert str(told[2].machines) == "node0 (10.0.0.99): ranks 0 and 1; node1 (10.0.0.2): rank 2"


def decided(store: dist.Store, rank: int, judge: Callable[[list[str]], str], patience: float = PATIENCE) -> str:
    try:
        return decide_together(own_connection(store), rank, 3, "x", f"mine{rank}", judge, patience)
    except (OutExists, WorldMismatch) as e:
        return f"{type(e).__name__}: {e}"


def test_rank_0_decides(store: dist.Store) -> None:
    """All get what it makes of all texts."""
    assert in_ranks(3, lambda rank: decided(store, rank, ",".join)) == ["mine0,mine1,mine2"] * 3


def test_an_error_is_raised_on_all(store: dist.Store) -> None:
    """With the same type and sentence."""

    def judge(texts: list[str]) -> str:
        raise OutExists(f"{texts[2]} is there")

    assert in_ranks(3, lambda rank: decided(store, rank, judge)) == ["OutExists: mine2 is there"] * 3


def test_a_rank_that_does_not_answer(store: dist.Store) -> None:
    """It is named."""
    told = in_ranks(2, lambda rank: decided(store, rank, ",".join, 0.3 if rank == 0 else PATIENCE))
    assert told == ["WorldMismatch: rank 0 waited 0.3 s for rank 2, which ended or hang"] * 2


ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
THREE = WorldMachines(
    (
        WorldMachine("node0", ADDRESSES[0], (0, 3)),
        WorldMachine("node1", ADDRESSES[1], (1,)),
        WorldMachine("node2", ADDRESSES[2], (2, 4)),
    )
)


def session(store: dist.Store, rank: int, machines: WorldMachines = THREE) -> Session:
    size = sum(len(m.ranks) for m in machines.all)
    local = machines.of(rank).ranks
    place = Place(rank=rank, size=size, local_rank=local.index(rank), local_size=len(local), launcher="x")
    return Session(place, own_connection(store), machines)


def test_the_tree(store: dist.Store) -> None:
    """40 machines of two ranks: rank 0 is linked to 16 machines and its neighbour, and nobody to more."""
    machines = WorldMachines(tuple(WorldMachine(f"n{i}", "", (2 * i, 2 * i + 1)) for i in range(40)))
    assert ranks_below(session(store, 0, machines), 0) == [1, *range(2, 34, 2)]
    assert ranks_below(session(store, 2, machines), 2) == [3, *range(34, 66, 2)]
    assert [rank_above(session(store, r, machines), r) for r in (0, 1, 2, 34, 35, 66)] == [None, 0, 0, 2, 34, 4]


def watches(store: dist.Store, silence: float = 10.0) -> tuple[list[MachineWatch], dict[int, str]]:
    ended: dict[int, str] = {}

    def made(rank: int) -> MachineWatch:
        def end(cause: dict[str, Any]) -> None:
            ended[rank] = cause["message"]

        watch = MachineWatch(session(store, rank), silence, "launch.heartbeat", end)
        watch.step = lambda: 7
        return watch

    return in_ranks(5, made), ended


def cut(watch: MachineWatch) -> None:
    """Close a rank's links as the system does it for a process that is killed; it says nothing more."""
    links: Links = watch._links  # pyright: ignore[reportPrivateUsage]
    links._closing = True  # pyright: ignore[reportPrivateUsage]
    for link in [*links.children, *([links.parent] if links.parent else [])]:
        link.connection.shutdown(socket.SHUT_RDWR)


def test_a_machine_is_lost(store: dist.Store) -> None:
    """All others learn which one; those that wait in a library's code are ended after a while."""
    made, ended = watches(store)
    cut(made[1])
    sentence = "node1 (127.0.0.2), rank 1, was lost after step 7: its connection was closed; its own log may say why"
    causes = in_ranks(5, lambda rank: made[rank].cause() if rank in (0, 2, 3) else None)
    assert [c and c["message"] for c in causes] == [sentence, None, sentence, sentence, None]
    until = time.monotonic() + PATIENCE
    while 4 not in ended and time.monotonic() < until:
        time.sleep(0.05)
    assert ended[4] == sentence
    assert not {0, 2, 3} & ended.keys()
    for watch in made:
        watch.close()


def test_rank_0_is_lost(store: dist.Store) -> None:
    """Each machine sees it by itself, and tells the ranks below."""
    made, _ = watches(store)
    cut(made[0])
    sentence = "node0 (127.0.0.1), rank 0, was lost after step 7: its connection was closed; its own log may say why"
    causes = in_ranks(5, lambda rank: made[rank].cause(), first=1)
    assert [c and c["message"] for c in causes] == [sentence] * 4
    for watch in made:
        watch.close()


def test_an_error_of_a_rank_reaches_all(store: dist.Store) -> None:
    """Through the first rank of its machine, and rank 0, which keeps it for its run folder."""
    made, _ = watches(store)
    made[4].fail({"kind": "WorkerFailed", "message": "rank 4 on node2 failed: ValueError: no", "error": "ValueError"})
    causes = in_ranks(5, lambda rank: made[rank].cause())
    assert [c and c["message"] for c in causes] == ["rank 4 on node2 failed: ValueError: no"] * 5
    assert [f["rank"] for f in made[0].failures] == [4]
    for watch in made:
        watch.close()


def test_the_end_is_no_loss(store: dist.Store) -> None:
    """Ranks that are done leave one after another, in any order, and nobody is blamed."""
    made, ended = watches(store)
    for rank in (0, 4, 1, 2, 3):
        made[rank].close()
        time.sleep(0.02)
    assert ended == {}
    assert [w._cause for w in made] == [None] * 5  # pyright: ignore[reportPrivateUsage]


def test_a_stranger_is_not_a_rank(store: dist.Store) -> None:
    """Who connects without the word is sent away: a scanner of ports, or a rank of another run."""
    two = WorldMachines((WorldMachine("a", ADDRESSES[0], (0,)), WorldMachine("b", ADDRESSES[1], (1,))))

    def made(rank: int) -> Links | None:
        if rank == 0:
            return Links(session(store, 0, two), 10.0)
        port = int(
            wait_for_key(own_connection(store), "links/launch/1/0", time.monotonic() + PATIENCE, "no port").split()[0]
        )
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "word": "x"}\n'):
            with socket.create_connection((ADDRESSES[0], port)) as stranger:
                stranger.sendall(said)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        return Links(session(store, 1, two), 10.0)

    first, second = in_ranks(2, made)
    assert first is not None
    assert second is not None
    assert ([x.rank for x in first.children], second.parent and second.parent.rank) == ([1], 0)
    second.close()
    first.close()


def test_no_way_to_a_machine(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody answers at: the sentence has both machines, and both ways out."""
    monkeypatch.setattr(links_module, "CONNECT_SECONDS", 0.2)
    two = WorldMachines((WorldMachine("a", ADDRESSES[0], (0,)), WorldMachine("b", ADDRESSES[1], (1,))))
    store.set("links/launch/1/0", "1 x")
    with pytest.raises(WorldMismatch) as e:
        Links(session(store, 1, two), 10.0)
    assert str(e.value) == (
        "b (127.0.0.2) cannot connect to 127.0.0.1:1 on a (127.0.0.1) (Connection refused), though it has found the "
        "ranks there: a firewall between the two? gloo and NCCL connect at ports of the range "
        "net.ipv4.ip_local_port_range: open it between the machines, or choose another network (machines.interface)"
    )
    with pytest.raises(WorldMismatch) as e:
        Links(session(store, 0, two), 10.0)
    assert str(e.value) == (
        f"{socket.gethostname()} was connected to by 0 of 1 ranks at an arbitrary port: a firewall? the other "
        "machines' logs say which could not"
    )


def test_interfaces() -> None:
    """The one that has an address, in either family; none has that of another machine."""
    assert (interface_of("127.0.0.1"), interface_of("192.0.2.77")) == ("lo", None)
    assert (address_of_interface("lo"), address_of_interface("no0")) == ("127.0.0.1", None)
    assert own_address_toward("127.0.0.1") == "127.0.0.1"
    assert (with_port("10.0.0.1", 5), with_port("fd00::1", 5)) == ("10.0.0.1:5", "[fd00::1]:5")


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu[03-04,7],login", "gpu03"), ("a1,b2", "a1"), ("n[7]", "n7"), ("x-[1-2]-ib", "x-1-ib")]
)
def test_first_host_of_slurm(nodes: str, host: str) -> None:
    """In its notation of several."""
    assert first_host(nodes) == host


def test_port_of_a_job() -> None:
    """The same on all machines, and outside the range that the kernel gives to connections."""
    assert port_of_job("7.0") == 23673
    assert all(20_000 <= port_of_job(f"{n}.0") < 32_000 for n in range(500))


def test_a_name_that_does_not_resolve() -> None:
    """It is said on which machine, and what to do."""
    with pytest.raises(WorldMismatch) as e:
        resolve_host("no-such-host.invalid", 0.0, said_by="srun gave the address of rank 0")
    why = "Name or service not known|Temporary failure in name resolution|No address associated with hostname"
    assert str(e.value) == (
        "srun gave the address of rank 0: the name 'no-such-host.invalid' does not resolve on "
        f"{socket.gethostname()} ({next(w for w in why.split('|') if w in str(e.value))}): give rank 0's numeric "
        "address instead of its name, or add the name to /etc/hosts of every machine"
    )


def test_what_goes_up_and_down_the_tree(store: dist.Store) -> None:
    """Rank 0 gets what all ranks give, and all get what it gives; it is linked to few of them."""
    made, _ = watches(store)
    up = in_ranks(5, lambda rank: made[rank].gather({str(rank): f"of {rank}"}))
    assert up == [{str(r): f"of {r}" for r in range(5)}, {}, {}, {}, {}]
    assert in_ranks(5, lambda rank: made[rank].broadcast({"0": "x"} if rank == 0 else {})) == [{"0": "x"}] * 5
    for watch in made:
        watch.close()


def test_nobody_waits_for_what_a_lost_rank_would_give(store: dist.Store) -> None:
    """Once the world has failed, gathering ends with what has come."""
    made, _ = watches(store)
    cut(made[2])
    assert in_ranks(5, lambda rank: made[rank].gather({"x": "y"}) if rank in (0, 1) else {})[1] == {}
    for watch in made:
        watch.close()
