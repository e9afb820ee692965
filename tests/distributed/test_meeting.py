"""Ranks on several machines, played by threads that share a store: how they find each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.support.rank_threads import PATIENCE, in_ranks, own_connection, serve_store
from unipar.distributed.addresses import (
    address_of_interface,
    first_host,
    interface_of,
    own_address_toward,
    port_of_job,
    resolve_host,
    with_port,
)
from unipar.distributed.meeting import rendezvous
from unipar.distributed.meeting.neighbours import Neighbours
from unipar.distributed.meeting.roll_call import (
    Presence,
    RollCall,
    call_roll,
    decide_together,
    read_machines,
)
from unipar.distributed.place import Place
from unipar.distributed.world_machines import WorldMachine, WorldMachines, name_ranks
from unipar.errors import OutExists, WorldMismatch


@pytest.fixture
def store() -> dist.Store:
    return serve_store()


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
    """The other program takes the connection and says nothing, for which torch waits without a limit."""
    monkeypatch.setattr(rendezvous, "_FOR_AN_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        place = Place(rank=1, size=2, local_rank=0, local_size=1, launcher="x", address=("127.0.0.1", port))
        with pytest.raises(WorldMismatch) as e:
            rendezvous.open_store(place, timedelta(seconds=0.1))
    assert str(e.value) == (
        f"rank 1 on {socket.gethostname()} is connected to 127.0.0.1:{port}, but what listens there has not answered "
        "within 0.1 s (launch.rendezvous_timeout): it is not rank 0 but another program; give the launcher another "
        "port, or set MASTER_ADDR and MASTER_PORT yourself"
    )


def test_all_learn_who_is_where(store: dist.Store) -> None:
    """Four ranks on two machines: one session, their neighbours, the largest number of restarts that any was told."""
    told = in_ranks(4, lambda rank: roll(store, rank, 4, presence(rank, restarts=2 if rank == 3 else 0)))
    first, second, third, fourth = [one for one in told if isinstance(one, RollCall)]
    assert len({one.session for one in (first, second, third, fourth)}) == 1
    assert (first.neighbours, third) == (second.neighbours, fourth)
    near = [WorldMachine("node0", "10.0.0.1", (0, 1)), WorldMachine("node1", "10.0.0.2", (2, 3))]
    assert first.neighbours == Neighbours(near[0], None, (2,), 0)
    assert third.neighbours == Neighbours(near[1], near[0], (), 1)
    whole = "node0 (10.0.0.1): ranks 0 and 1; node1 (10.0.0.2): ranks 2 and 3"
    assert [str(first.machines), third.machines, str(read_machines(store, third))] == [whole, None, whole]
    assert first.restarts == 2


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
    assert isinstance(second[1], RollCall)
    assert second[0].session == second[1].session
    assert (first[0].session == second[0].session, first[0].restarts, second[0].restarts) == (False, 0, 1)


def test_who_is_missing(store: dist.Store) -> None:
    """Those who came end together, with one sentence."""
    told = in_ranks(3, lambda rank: roll(store, rank, 4, presence(rank, per=1), patience=0.5))
    assert set(told) == {
        "3 of 4 ranks have met within 0.5 s (launch.rendezvous_timeout), and rank 3 is missing (here are node0: rank "
        "0; node1: rank 1; node2: rank 2): was the launcher started on every machine, and is there a way from each to "
        "rank 0's (a firewall)?"
    }


def test_rank_0_never_came(store: dist.Store) -> None:
    """The store may be that of an agent, which is there without rank 0."""
    assert roll(store, 1, 2, patience=0.3) == (
        "rank 1 on node0 has reached the meeting point and waited 0.3 s (launch.rendezvous_timeout) for rank 0: it has "
        "ended, or was never started"
    )


def test_own_name_on_loopback(store: dist.Store) -> None:
    """On Debian a machine's own name is 127.0.1.1: rank 0's machine is told by its way to another one."""
    here = Presence("a", "node0", "127.0.1.1")
    told = in_ranks(3, lambda rank: roll(store, rank, 3, here if rank < 2 else Presence("b", "node1", "10.0.0.2")))
    assert isinstance(told[2], RollCall)
    assert str(read_machines(store, told[2])) == "node0 (10.0.0.99): ranks 0 and 1; node1 (10.0.0.2): rank 2"


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
    """The rank is named."""
    told = in_ranks(2, lambda rank: decided(store, rank, ",".join, 0.3 if rank == 0 else PATIENCE))
    assert told == ["WorldMismatch: rank 0 waited 0.3 s for rank 2, which ended or hang; their logs may say why"] * 2


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
    """The error says on which machine, and what to do."""
    with pytest.raises(WorldMismatch) as e:
        resolve_host("no-such-host.invalid", 0.0, said_by="srun gave the address of rank 0")
    why = "Name or service not known|Temporary failure in name resolution|No address associated with hostname"
    assert str(e.value) == (
        "srun gave the address of rank 0: the name 'no-such-host.invalid' does not resolve on "
        f"{socket.gethostname()} ({next(w for w in why.split('|') if w in str(e.value))}): give rank 0's numeric "
        "address instead of its name, or add the name to /etc/hosts of every machine"
    )
