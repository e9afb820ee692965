"""`unipar doctor --across` over machines of namespaces: what is printed, and how each command ends."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.machine_launches import Job
from tests.support.machines.machine import Machine, in_network
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
