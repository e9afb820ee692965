"""`unipar doctor --across`: what the facts of all machines mean, as checks and as the table that rank 0 prints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unipar.distributed.machine_checks import MachineCheck
from unipar.distributed.place import Place
from unipar.distributed.world_machines import WorldMachines
from unipar.launcher.preflight.examination import EXAMINATION, FINDINGS, judge_findings
from unipar.launcher.preflight.facts import ConfigFacts, MachineFacts
from unipar.launcher.preflight.judging import ExaminedMachine, Findings, judge_machines
from unipar.launcher.preflight.network import NetworkFacts
from unipar.launcher.preflight.outcome import Examination
from unipar.launcher.preflight.run_folder import FolderFacts

ROOT = Path(__file__).parents[3]
VERSIONS = {"python": "3.11", "unipar": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "horovod": "0.28.1"}
CONFIG = ConfigFacts(
    sections={"train": "a1", "batch": "b1"}, code={"train.py": "c1"}, device="cpu", backend="native", modules=["torch"]
)
FACTS = MachineFacts(
    versions=VERSIONS,
    cpu="Some CPU",
    instructions=["avx", "avx2"],
    own_address="10.0.0.1",
    interface="eth0",
    mtu=1500,
    speed=10000,
    interfaces=["lo", "eth0"],
    config=CONFIG,
)
OPEN = NetworkFacts(ports={"1": "open"}, latency=0.00021, bandwidth=1.1e9, reduced=64 * 2**20)
FOLDER = FolderFacts(out="/home/me/runs/train", base="/home/me/runs", free=2**40, writable=True)
NODE1 = ExaminedMachine(name="node1", address="10.0.0.1", facts=FACTS, network=OPEN, folder=FOLDER)
NODE2 = ExaminedMachine(
    name="node2",
    address="10.0.0.2",
    facts=replace(FACTS, own_address="10.0.0.2"),
    network=replace(OPEN, ports={"0": "open"}),
    folder=FOLDER,
)


def with_facts(machine: ExaminedMachine, **changes: Any) -> ExaminedMachine:
    return replace(machine, facts=replace(machine.facts, **changes))


def with_config(machine: ExaminedMachine, **changes: Any) -> ExaminedMachine:
    assert machine.facts.config is not None
    return with_facts(machine, config=replace(machine.facts.config, **changes))


def with_network(machine: ExaminedMachine, **changes: Any) -> ExaminedMachine:
    return replace(machine, network=replace(machine.network, **changes))


def with_folder(machine: ExaminedMachine, **changes: Any) -> ExaminedMachine:
    assert machine.folder is not None
    return replace(machine, folder=replace(machine.folder, **changes))


def wrong(*machines: ExaminedMachine) -> list[tuple[str, str, str, str]]:
    """All checks that are not ok: status, name, finding, remedy."""
    return [(c.status, c.name, c.finding, c.remedy) for c in judge_machines(machines) if c.status != "ok"]


def test_all_well() -> None:
    """What all machines have in common is said in a few words."""
    checks = judge_machines([NODE1, NODE2])
    assert {check.status for check in checks} == {"ok"}
    assert "; ".join(check.finding for check in checks) == (
        "config and task; python 3.11, unipar 0.1.0, torch 2.13.0, numpy 2.4.6, horovod 0.28.1; no GPU; CPU; clocks "
        "within 0.0 us; own names resolve; eth0, MTU 1500, 10 Gbit/s; ports open both ways; all-reduce 210 us for 1 B, "
        "1.1 GB/s for 64 MiB (gloo); one run folder; limits and /dev/shm"
    )


SAME_FILES = "copy the same files to all machines"
CLOCK_REMEDY = "set it by a time service (timedatectl set-ntp true, or chronyd): times in logs do not compare"
OPEN_PORTS = "open the ports of net.ipv4.ip_local_port_range between the machines, in both directions"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            with_facts(NODE2, versions=VERSIONS | {"torch": "2.12.0"}),
            ("fail", "torch", "2.13.0 on node1; 2.12.0 on node2", "install one version on all machines"),
        ),
        (
            with_facts(NODE2, versions={name: v for name, v in VERSIONS.items() if name != "horovod"}),
            (
                "warn",
                "horovod",
                "0.28.1 on node1; missing on node2",
                "install one version on all machines, if the run needs it",
            ),
        ),
        (
            with_facts(NODE2, versions=VERSIONS | {"NCCL": "2.27.3"}),
            ("fail", "NCCL", "missing on node1; 2.27.3 on node2", "install one version on all machines"),
        ),
        (
            with_config(NODE2, code={"train.py": "c2"}),
            ("fail", "code", "the file train.py on node2 is not that of node1", SAME_FILES),
        ),
        (
            with_config(NODE2, sections={"train": "a2", "batch": "b1"}),
            ("fail", "config", "the config's section train on node2 is not that of node1", SAME_FILES),
        ),
        (
            with_config(NODE2, error="there is no file x.yaml"),
            ("fail", "config", "node2: there is no file x.yaml", SAME_FILES),
        ),
        (
            with_config(NODE2, missing="backend 'native' needs torch, not installed here: pip install torch"),
            (
                "fail",
                "backend native",
                "node2: backend 'native' needs torch, not installed here",
                "pip install torch",
            ),
        ),
        (
            with_facts(NODE2, gpus=["H200", "H200"]),
            (
                "warn",
                "GPUs",
                "no GPU on node1; 2 x H200 on node2",
                "the slowest GPU sets the pace: take equal machines",
            ),
        ),
        (
            with_facts(NODE2, instructions=["avx"]),
            (
                "warn",
                "CPU",
                "avx avx2 on node1; avx on node2",
                "code compiled on one may end with SIGILL on another: set TORCH_EXTENSIONS_DIR to a folder of each "
                "machine's own, such as /tmp/compiled",
            ),
        ),
        (
            with_facts(NODE2, cpu="Other CPU"),
            (
                "warn",
                "CPU",
                "Some CPU on node1; Other CPU on node2",
                "the slowest sets the pace: take equal machines where it matters",
            ),
        ),
        (
            with_network(NODE2, ahead=-90.2, uncertainty=0.001),
            (
                "warn",
                "clock",
                "node2 is 1 min 30 s behind node1",
                f"{CLOCK_REMEDY}, and torchrun --rdzv-backend c10d takes the other machine for dead and never starts",
            ),
        ),
        (
            with_network(NODE2, ahead=2.0, uncertainty=0.001),
            ("warn", "clock", "node2 is 2.0 s ahead of node1", CLOCK_REMEDY),
        ),
        (
            with_facts(NODE2, own_address=""),
            (
                "warn",
                "own name",
                "node2 does not resolve its own name; launchers other than unipar's may fail",
                "add the line '10.0.0.2 node2' to its /etc/hosts",
            ),
        ),
        (
            with_facts(NODE2, own_address="127.0.1.1"),
            (
                "warn",
                "own name",
                "node2 is 127.0.1.1 to itself",
                "unipar finds the right address; torchrun's c10d rendezvous needs --rdzv-conf is_host=1 on the first "
                "machine and --local-addr ADDRESS on each, or else --node-rank and --master-addr",
            ),
        ),
        (
            with_facts(NODE2, missing_interface="ib0"),
            (
                "fail",
                "interface",
                "machines.interface: ib0 has no address on node2",
                "name another; there are lo, eth0",
            ),
        ),
        (
            with_facts(NODE2, mtu=1400),
            (
                "warn",
                "MTU",
                "largest packet (MTU): 1500 bytes (eth0) on node1; 1400 bytes (eth0) on node2",
                "ip link set eth0 mtu 1500 on all machines; where packets are too large for one, a run hangs at its "
                "first large tensor",
            ),
        ),
        (
            with_facts(NODE2, speed=100),
            (
                "warn",
                "link speed",
                "10 Gbit/s (eth0) on node1; 100 Mbit/s (eth0) on node2",
                "name a faster network (machines.interface), or look at cable and switch",
            ),
        ),
        (
            with_network(NODE2, ports={"0": "no answer"}),
            (
                "fail",
                "ports",
                "node2 cannot connect to a port of node1: no answer in 5 s, so a firewall drops packets",
                OPEN_PORTS,
            ),
        ),
        (
            with_network(NODE2, ports={"0": "refused"}),
            ("fail", "ports", "node2 cannot connect to a port of node1: refused, so a firewall rejects it", OPEN_PORTS),
        ),
        (
            with_network(NODE2, ports={"0": "No route to host"}),
            (
                "fail",
                "ports",
                "node2 cannot connect to a port of node1: No route to host",
                "are both in one network? choose one that both are in (machines.interface)",
            ),
        ),
        (
            with_network(NODE2, latency=None, bandwidth=None, error="connectFullMesh failed"),
            (
                "fail",
                "all-reduce",
                "node2: connectFullMesh failed",
                "open all ports between all machines, or choose another network (machines.interface)",
            ),
        ),
        (
            with_network(NODE2, bandwidth=9.5e6),
            (
                "warn",
                "all-reduce",
                "all-reduce 210 us for 1 B, 9.5 MB/s for 64 MiB (gloo)",
                "training will wait for the network: name a faster one (machines.interface), or send less (plan)",
            ),
        ),
        (
            with_folder(NODE2, shared=False, lacks="/home/me/runs"),
            (
                "warn",
                "run folder",
                "/home/me/runs is on node1, and not on node2",
                "mount it there as well, or mkdir -p /home/me/runs",
            ),
        ),
        (
            with_folder(NODE2, writable=False),
            (
                "fail",
                "run folder",
                "node2 cannot write to /home/me/runs",
                "name another folder (out: ..., or --out DIR), or change its owner",
            ),
        ),
        (
            with_folder(NODE2, free=2**20),
            (
                "warn",
                "run folder",
                "node2 has 1.0 MiB free in /home/me/runs",
                "free some space there, or name another folder (out: ...)",
            ),
        ),
        (
            with_folder(NODE2, lock="does not hold"),
            (
                "warn",
                "locks",
                "a lock of node1 in /home/me/runs is not seen by node2",
                "mount it with locks (NFS: without nolock); until then two runs may write to one folder unnoticed",
            ),
        ),
        (
            with_facts(NODE2, limits=[MachineCheck("open files", "warn", "at most 256", "ulimit -n 4096")]),
            ("warn", "open files", "node2: at most 256", "ulimit -n 4096"),
        ),
    ],
)
def test_one_machine_differs(other: ExaminedMachine, expected: tuple[str, str, str, str]) -> None:
    """One line for it, with its remedy."""
    assert wrong(NODE1, other) == [expected]


def test_a_config_that_is_wrong_everywhere() -> None:
    """Such a config is no difference between machines."""
    broken = [with_config(node, error="train.steps: must be positive") for node in (NODE1, NODE2)]
    assert wrong(*broken) == [("fail", "config", "train.steps: must be positive", "correct it")]


def test_a_machine_without_the_gpus_that_the_config_asks_for() -> None:
    """Each rank needs one; `cuda:1` a second one."""
    first, second = (with_config(with_facts(n, gpus=["H200"] * 4), device="cuda", per=4) for n in (NODE1, NODE2))
    remedy = "leave that machine out, or set device: cpu"
    fewer = "node2: device: cuda for 4 ranks, and torch sees 3 GPUs there"
    assert wrong(first, with_facts(second, gpus=["H200"] * 3))[0] == ("fail", "device", fewer, remedy)
    first, second = (with_config(with_facts(n, gpus=["H200"] * 2), device="cuda:1") for n in (NODE1, NODE2))
    assert wrong(first, second) == []
    fewer = "node2: device: cuda:1, and torch sees 1 GPU there"
    assert wrong(first, with_facts(second, gpus=["H200"]))[0] == ("fail", "device", fewer, remedy)


def test_device_auto_means_two_things() -> None:
    """One machine would train on its GPUs, the other one on its CPU."""
    second = with_config(with_facts(NODE2, gpus=["H200"]), device="cuda")
    assert wrong(NODE1, second)[0] == (
        "fail",
        "device",
        "cpu on node1; cuda on node2",
        "set device: cpu or cuda, or leave the odd machine out",
    )


def test_a_folder_that_should_be_shared() -> None:
    """machines.folder: shared, and it is not; with auto, some machines that do not see it are a warning."""
    nodes = [with_config(node, folder="shared") for node in (NODE1, with_folder(NODE2, shared=False))]
    assert wrong(*nodes) == [
        (
            "fail",
            "run folder",
            "machines.folder: shared, and node2 does not see /home/me/runs of node1",
            "name a folder that all machines mount (out: ...), or say machines.folder: own",
        )
    ]
    third = replace(with_folder(NODE2, shared=False), name="node3")
    assert wrong(NODE1, NODE2, third) == [
        (
            "warn",
            "run folder",
            "/home/me/runs/train of node1 is not seen by node3, which will write to a folder of its own",
            "mount it there as well, or say machines.folder: own",
        )
    ]


def test_links_that_are_all_slow() -> None:
    """They agree, and are a warning all the same."""
    nodes = [with_facts(node, speed=100) for node in (NODE1, NODE2)]
    assert [check[:3] for check in wrong(*nodes)] == [("warn", "link speed", "100 Mbit/s (eth0) on node1 and node2")]


def test_a_machine_that_could_not_look() -> None:
    """Nothing is compared then: it is the one thing to see to."""
    machines = WorldMachines.of_ranks("abb", ["node1", "node2", "node2"], ["10.0.0.1", "10.0.0.2", "10.0.0.2"])
    place = Place(rank=0, size=3, local_rank=0, local_size=1, launcher="srun")
    told = [Findings(), Findings(error="OSError: no /proc"), Findings()]
    assert judge_findings(place, machines, told).checks == (
        MachineCheck(
            "examination",
            "fail",
            "node2 (10.0.0.2): OSError: no /proc",
            "see to that first, and start it again",
        ),
    )


def test_many_machines_are_few_words() -> None:
    """Of more than three names, the first ones."""
    others = [replace(NODE2, name=f"node{k}") for k in range(2, 101)]
    odd = with_facts(replace(NODE2, name="node101"), mtu=9000)
    assert wrong(NODE1, *others, odd)[0][2] == (
        "largest packet (MTU): 1500 bytes (eth0) on node1, node2, node3 and 97 more; 9000 bytes (eth0) on node101"
    )


def test_the_table_in_the_docs() -> None:
    """docs/launchers.md shows what is printed for a version and a packet size that differ, in at most 80 columns."""
    odd = with_facts(NODE2, versions=VERSIONS | {"torch": "2.12.0"}, mtu=1400)
    checks = judge_machines([NODE1, with_network(odd, uncertainty=0.0004)])
    table = Examination("srun", ("node1 (10.0.0.1)", "node2 (10.0.0.2)"), tuple(checks)).table()
    page = (ROOT / "docs/launchers.md").read_text("utf-8")
    (shown,) = re.findall(r"```console\n\$ srun [^\n]*doctor --across[^\n]*\n(.*?)```", page, re.DOTALL)
    assert shown == f"{table}\n"
    assert max(map(len, table.splitlines())) <= 80


def test_facts_travel_as_json() -> None:
    """What a machine writes is what rank 0 reads."""
    facts = replace(FACTS, limits=[MachineCheck("open files", "warn", "at most 256", "ulimit -n 4096")])
    found = Findings(facts=with_config(NODE1).facts, network=NODE1.network, folder=NODE1.folder)
    for one in (found, replace(found, facts=facts), Findings(error="none")):
        assert FINDINGS.validate_json(FINDINGS.dump_json(one)) == one
    outcome = Examination("srun", ("a",), tuple(facts.limits))
    assert EXAMINATION.validate_json(json.dumps(outcome.to_json())) == outcome
    assert outcome.to_json()["ok"] is True
