"""`unipar doctor --across`, really over machines that share nothing but a wire."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.machine_launches import Job
from tests.support.machines.clock import reason_no_wrong_clock, wrong_clock
from tests.support.machines.machine import Machine, in_network, reason_no_firewall
from tests.support.machines.start import machines, reason_no_machines
from tests.support.programs import skip_because
from tests.support.world import ROOT

WORK = "/tmp/work"
"""Folder in which the commands run on each machine."""

CONFIG = """
task: {use: tiny.py:Tiny}
backend: native
device: cpu
batch: {total: 8}
train: {steps: 5, optimizer: {name: sgd, lr: 0.01}}
launch: {rendezvous_timeout: 60}
"""
PATIENCE = 150.0


@dataclass(frozen=True)
class Examined:
    """What came of it."""

    codes: dict[str, int]
    """Exit code of each command that was started, by its machine."""

    printed: dict[str, str]
    """Standard output of each."""

    said: dict[str, str]
    """Standard error of each."""


def lay_files(machine: Machine, config: str = CONFIG) -> Path:
    """Put a config and its task onto a machine's own disk; return their folder, seen from outside."""
    folder = machine.path(WORK)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.yaml").write_text(config, "utf-8")
    shutil.copy(ROOT / "tests/support/tiny.py", folder / "tiny.py")
    return folder


def examine(
    job: Job,
    *arguments: str,
    launcher: str = "by hand",
    variables: Mapping[str, Mapping[str, str]] | None = None,
) -> Examined:
    """Run `unipar doctor --across` with these arguments to its end on all machines.

    `variables`: further ones, by name of a machine.
    """
    job.prepare()
    started: dict[str, subprocess.Popen[bytes]] = {}
    logs: dict[str, Path] = {}
    for machine, words in job.commands(launcher, "unipar", "doctor", "--across", *arguments):
        own = [f"{name}={value}" for name, value in (variables or {}).get(machine.name, {}).items()]
        apart = ["sh", "-c", f'exec "$@" > {WORK}/out 2> {WORK}/err', "sh", "env", *own, *words]
        logs[machine.name] = machine.path(WORK)
        started[machine.name] = machine.start(apart, logs[machine.name] / "log", env=job.env, at=WORK)
    try:
        codes = {name: process.wait(PATIENCE) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    return Examined(
        codes,
        {name: (folder / "out").read_text("utf-8") for name, folder in logs.items()},
        {name: (folder / "err").read_text("utf-8") for name, folder in logs.items()},
    )


def set_mtu(machine: Machine, size: int) -> None:
    """Set the largest packet of a machine's interface."""
    in_network(machine.pid, "ip", "link", "set", "eth0", "mtu", str(size))


def reject_connections(machine: Machine, ports: str) -> None:
    """A firewall on one machine that refuses new connections to these ports."""
    in_network(machine.pid, "nft", "add table inet wall")
    in_network(machine.pid, "nft", "add chain inet wall arrives { type filter hook input priority 0; }")
    in_network(machine.pid, "nft", f"add rule inet wall arrives tcp dport {ports} ct state new reject with tcp reset")


pytestmark = skip_because(reason_no_machines())

HEAD = "2 machines, started by whoever set RANK and WORLD_SIZE: node1 (10.213.7.1),\nnode2 (10.213.7.2)\n"
WELL = re.compile(
    r"config and task; python 3\.\d+, .*torch \S+, .*; own names resolve; eth0, MTU 1500, 10 Gbit/s; ports open both "
    r"ways; all-reduce \S+ \S+ for 1 B, \S+ [MG]B/s for \S+ MiB \(gloo\); run folder of each machine's own; limits and "
    r"/dev/shm; port 29400 was free"
)
FIREWALL = skip_because(reason_no_firewall())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Generator[Job]:
    with machines(2, tmp_path_factory.mktemp("machines"), share=[shared]) as made:
        yield Job(made, (1, 1))


@pytest.fixture(autouse=True)
def _files(job: Job) -> None:
    for machine in job.machines:
        lay_files(machine)


def wrong(outcome: Examined) -> list[str]:
    """Lines of the table that are not ok, with their remedies."""
    return [" ".join(line.split()) for line in outcome.printed["node1"].partition("found\n")[2].splitlines()]


def folded(text: str) -> str:
    return " ".join(text.split())


def test_all_well(job: Job) -> None:
    """Two ranks on each machine: rank 0 prints one table, the others nothing."""
    outcome = examine(Job(job.machines, (2, 2)), "x.yaml")
    assert outcome.codes == {"node1": 0, "node2": 0}, outcome.said
    assert outcome.printed["node2"] == ""
    printed = outcome.printed["node1"]
    assert printed.startswith(HEAD)
    assert printed.endswith("\nready to run\n")
    assert WELL.search(folded(printed))
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.sweep
def test_a_shared_folder(job: Job, shared: Path) -> None:
    """Found by looking, and a lock of one machine is seen by the other; the mark is gone afterwards."""
    outcome = examine(job, "x.yaml", "--out", str(shared / "runs/x"))
    assert outcome.codes == {"node1": 0, "node2": 0}, outcome.said
    assert "; one run folder; " in folded(outcome.printed["node1"])
    assert list(shared.iterdir()) == []


@skip_because(reason_no_wrong_clock())
def test_another_version_task_and_packet_size_a_wrong_clock_and_a_folder_on_one(job: Job) -> None:
    """Each is a line with its remedy, and all machines exit with the same code."""
    first, second = job.machines
    task = lay_files(second) / "tiny.py"
    task.write_text(task.read_text("utf-8") + "# another\n", "utf-8")
    other = second.path("/tmp/other/torch-2.12.0.dist-info")
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n", "utf-8")
    first.path("/tmp/data/runs").mkdir(parents=True)
    set_mtu(second, 1400)
    variables = wrong_clock(second, 90) | {"PYTHONPATH": f"/tmp/other:{job.env['PYTHONPATH']}"}
    try:
        outcome = examine(job, "x.yaml", "--out", "/tmp/data/runs/x", variables={"node2": variables})
    finally:
        set_mtu(second, 1500)
    assert outcome.codes == {"node1": 1, "node2": 1}, outcome.said
    printed = folded(re.sub(r"torch +\S+ on node1", "torch HERE on node1", outcome.printed["node1"]))
    for line in (
        "fail code the file tiny.py on node2 is not that of node1 -> copy the same files to all machines",
        "fail torch HERE on node1; 2.12.0 on node2 -> install one version on all machines",
        "warn clock node2 is 1 min 30 s ahead of node1 -> set it by a time service",
        "warn MTU largest packet (MTU): 1500 bytes (eth0) on node1; 1400 bytes (eth0) on node2 -> ip link set eth0 mtu",
        "warn run folder /tmp/data/runs is on node1, and not on node2 -> mount it there as well, or mkdir -p",
        "not ready to run: 2 failures, 3 warnings",
    ):
        assert line in printed
    assert outcome.printed["node2"] == ""


def test_a_config_on_one_machine_only(job: Job) -> None:
    """The machines meet all the same; an interface that is missing is no reason not to meet either."""
    first, second = job.machines
    lay_files(first, CONFIG + "machines: {interface: ib0}\n")
    (lay_files(second) / "x.yaml").unlink()
    outcome = examine(job, "x.yaml")
    assert outcome.codes == {"node1": 1, "node2": 1}, outcome.said
    assert wrong(outcome)[:4] == [
        "fail config node2: there is no file x.yaml",
        "-> copy the same files to all machines",
        "fail interface machines.interface: ib0 has no address on node1",
        "-> name another; there are lo, eth0",
    ]


@pytest.mark.sweep
def test_own_name_is_loopback(tmp_path: Path) -> None:
    """Debian's /etc/hosts: a warning, for unipar itself finds the right address."""
    with machines(2, tmp_path / "machines", hosts="debian") as made:
        for machine in made:
            lay_files(machine)
        outcome = examine(Job(made, (1, 1)))
    assert outcome.codes == {"node1": 0, "node2": 0}, outcome.said
    assert wrong(outcome)[0] == "warn own name node1 is 127.0.1.1 to itself; node2 is 127.0.1.1 to itself"


@FIREWALL
@pytest.mark.sweep
def test_a_firewall_that_refuses(tmp_path: Path) -> None:
    """One direction is closed; the all-reduce, which would wait for it, is not tried."""
    with machines(2, tmp_path / "machines") as made:
        for machine in made:
            lay_files(machine)
        reject_connections(made[1], "32768-60999")
        outcome = examine(Job(made, (1, 1)), "x.yaml")
    assert outcome.codes == {"node1": 1, "node2": 1}, outcome.said
    assert wrong(outcome)[:4] == [
        "fail ports node1 cannot connect to a port of node2: refused, so a firewall",
        "rejects it",
        "-> open the ports of net.ipv4.ip_local_port_range between the",
        "machines, in both directions",
    ]
    assert "all-reduce" not in outcome.printed["node1"]


@FIREWALL
@pytest.mark.sweep
def test_a_firewall_that_drops(tmp_path: Path) -> None:
    """Between the second and the third machine, which both reach the first."""
    with machines(3, tmp_path / "machines") as made:
        for machine in made:
            lay_files(machine)
        made[2].drop_packets_from(made[1])
        outcome = examine(Job(made, (1, 1, 1)), "x.yaml")
    assert outcome.codes == {"node1": 1, "node2": 1, "node3": 1}, outcome.said
    printed = folded(outcome.printed["node1"])
    for one, two in (("node2", "node3"), ("node3", "node2")):
        assert f"{one} cannot connect to a port of {two}: no answer in 5 s, so a firewall drops packets" in printed
    assert printed.endswith("not ready to run: 2 failures")
