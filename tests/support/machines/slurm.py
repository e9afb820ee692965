"""A Slurm cluster over several machines: `with slurm_over(machines) as environment`; slurmctld is on the first.

Needs what tests.support.slurm needs. Nothing is shared: each machine has config, key and spool on its own disk.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.launchers import environment
from tests.support.machines.machine import Machine
from tests.support.programs import find_program
from tests.support.slurm import PATIENCE, munged_command, write_cluster_files

FOLDER = "/tmp/slurm"
IPV6_ALONE = "CommunicationParameters=EnableIPv6,DisableIPv4"


@contextmanager
def slurm_over(machines: Sequence[Machine], *, silence: int = 10) -> Generator[dict[str, str]]:
    """Up when the body begins; yields the variables with which its commands are run on any of the machines."""
    more = IPV6_ALONE if machines[0].family == "ipv6" else ""
    key, nodes = secrets.token_bytes(128), [(machine.name, machine.address) for machine in machines]
    variables = {"SLURM_CONF": f"{FOLDER}/slurm.conf"}
    env = {**environment(), **variables}
    with ExitStack() as ends:
        for machine in machines:
            folder = machine.path(FOLDER)
            write_cluster_files(folder, nodes, key, seen_as=FOLDER, silence=silence, more=more)
            _start(ends, machine, munged_command(Path(FOLDER)), env)
        for machine in machines:
            _wait_until(machine.path(f"{FOLDER}/munge.socket").exists, f"no munged on {machine.name}")
        _start(ends, machines[0], ["slurmctld", "-D"], env)
        _wait_until(lambda: _answers(machines[0], env), "no slurmctld")  # a node that comes too early comes late again
        for machine in machines:
            _start(ends, machine, ["slurmd", "-D"], env)
        _wait_until(lambda: node_states(machines[0], env) == ["idle"] * len(machines), "not all nodes are idle")
        yield variables


def node_states(machine: Machine, env: Mapping[str, str]) -> list[str]:
    """Return the state of each node, as a machine is told."""
    return machine.run(["sinfo", "--noheader", "--Node", "--format=%t"], env=env).stdout.split()


def _answers(machine: Machine, env: Mapping[str, str]) -> bool:
    return machine.run(["scontrol", "ping"], env=env).returncode == 0


def _start(ends: ExitStack, machine: Machine, words: Sequence[str], env: Mapping[str, str]) -> None:
    program = find_program(words[0])
    assert program is not None
    log = machine.path(f"{FOLDER}/{Path(program).name}.out")
    ends.callback(_end, machine.start([program, *words[1:]], log, env=env, at="/"))


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # its machine may be off
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until(true: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, otherwise
        time.sleep(0.05)
