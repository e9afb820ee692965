"""Machines that share nothing but a wire: `with machines(2, folder) as (first, second)`.

    python -m tests.support.machines.start FOLDER [--number 2] [--ssh] [--share DIR]... [--family ipv6] [--hosts debian]

Each has a network, a process table, a host name, System V memory, /tmp, /root, /dev/shm, /run, a boot id, /etc/hosts
and, if asked for, an sshd of its own; a switch joins them (10.213.7.1, .2, .3 on eth0). All else is what this machine
has, read-only. Nothing is made in the network of this process. Needs root and Debian's iproute2 and util-linux; sshd
needs openssh-server and openssh-client.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

from tests.support.machines.first_process import DISK, MEMORY, Layout
from tests.support.machines.machine import (
    ADDRESSES,
    MANAGEMENT,
    PREFIX,
    Family,
    Machine,
    in_network,
    name_of,
    port,
)
from tests.support.programs import reason_no_programs
from tests.support.world import PYTHONPATH_VARIABLE, ROOT

Hosts = Literal["network", "debian"]
"""What a machine's own name means to itself: its address in the network, or Debian's 127.0.1.1."""

SSHD = "/usr/sbin/sshd"
MOST = 9
"""Machines that know one another's name."""

_SSHD_CONFIG = """
Port 22
ListenAddress {address}
HostKey /root/.ssh/host_key
AuthorizedKeysFile /root/.ssh/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 100
"""
_SSH_CONFIG = """
Host *
  IdentityFile /root/.ssh/user_key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@cache
def reason_no_machines() -> str:
    """Why there can be no such machines here; empty: there can."""
    if why := reason_no_programs("ip", "nsenter", "unshare"):
        return why
    if os.getuid() != 0:
        return "networks with a wire between them are made by root only"
    namespaces = ("--net", "--pid", "--fork", "--mount-proc", "--mount", "--uts", "--ipc")
    wire = "ip link add name switch type bridge && ip link add name a type veth peer name b && hostname x"
    done = subprocess.run(["unshare", *namespaces, "sh", "-c", wire], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"the kernel gives no namespaces with a bridge: {' '.join(done.stderr.split())}"
    return ""


@contextmanager
def machines(
    number: int,
    folder: Path,
    *,
    share: Sequence[Path] = (),
    hosts: Hosts = "network",
    family: Family = "ipv4",
    management: bool = False,
    ssh: bool = False,
) -> Generator[list[Machine]]:
    """Up when the body begins, gone when it has ended; `folder` holds their disks, and stays.

    `management` gives each a second network, on the interface that comes first: the default route leads there, a
    machine's own name means its address there, and no machine reaches another through it.
    """
    assert number <= MOST
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ends:
        switch = _start_first_process(ends, None)
        in_network(switch, "ip", "-batch", "-", text=_switch_commands(management))
        made: list[Machine] = []
        for n in range(1, number + 1):
            own = folder / name_of(n)
            own.mkdir(exist_ok=True)
            texts = hosts_file(n, hosts, family, management)
            layout = Layout(name_of(n), str(own.resolve()), texts, _seen(), [str(p.resolve()) for p in share])
            machine = Machine(n, family, own, _start_first_process(ends, layout), switch)
            in_network(switch, "ip", "-batch", "-", text=_wire_commands(machine, management))
            in_network(machine.pid, "ip", "-batch", "-", text=_address_commands(machine, management))
            made.append(machine)
        if ssh:
            _make_keys(folder)
            for machine in made:
                _start_sshd(machine, folder)
        yield made


def hosts_file(number: int, hosts: Hosts, family: Family, management: bool) -> str:
    own = MANAGEMENT[family] if management else ADDRESSES[family]
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{'127.0.1.1' if hosts == 'debian' else own.format(number)} {name_of(number)}"]
    lines += [f"{ADDRESSES[family].format(n)} {name_of(n)}" for n in range(1, MOST + 1) if n != number]
    return "".join(f"{line}\n" for line in lines)


def _seen() -> list[str]:
    """Code and interpreter, where they lie in folders that each machine has for itself."""
    paths = [ROOT, *(Path(p) for p in PYTHONPATH_VARIABLE["PYTHONPATH"].split(os.pathsep)), sys.prefix, sys.base_prefix]
    found = {path.resolve() for path in map(Path, paths) if path.is_dir()}
    hidden = {path for path in found if any(path.is_relative_to(own) for own in (*DISK, *MEMORY))}
    return sorted(str(path) for path in hidden if not set(path.parents) & hidden)


def _start_first_process(ends: ExitStack, layout: Layout | None) -> int:
    """Start one, and return its process number."""
    words = [sys.executable, "-m", "tests.support.machines.first_process", *([layout.dumps()] if layout else [])]
    environment = {**os.environ, **PYTHONPATH_VARIABLE}
    first = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    ends.callback(_end, first)
    assert first.stdout is not None
    pid = first.stdout.readline()
    assert pid, f"no {layout.name if layout else 'switch'}"
    return int(pid)


def _end(first: subprocess.Popen[str]) -> None:
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdin.close()
    try:
        first.wait(5)
    except subprocess.TimeoutExpired:
        first.kill()
        first.wait()
    first.stdout.close()


def _switch_commands(management: bool) -> str:
    bridges = ["switch", *(["manager"] if management else [])]
    return "".join(
        f"link add name {name} type bridge forward_delay 0\nlink set {name} addrgenmode none\nlink set {name} up\n"
        for name in bridges
    )


def _wire_commands(machine: Machine, management: bool) -> str:
    """Wires from the switch to one machine; the management's come first, and do not lead to other machines."""
    lines: list[str] = []
    for bridge, end, inner in [("manager", f"m{port(machine.number)}", "mgmt0")] * management + [
        ("switch", port(machine.number), "eth0")
    ]:
        lines += [
            f"link add name {end} type veth peer name {inner} netns {machine.pid}",
            f"link set {end} addrgenmode none",
            f"link set {end} master {bridge} up",
        ]
        if bridge == "manager":
            lines += [f"link set {end} type bridge_slave isolated on"]
    return "".join(f"{line}\n" for line in lines)


def _address_commands(machine: Machine, management: bool) -> str:
    prefix, nodad = PREFIX[machine.family], " nodad" if machine.family == "ipv6" else ""
    lines = ["link set lo up"]
    if management:
        gateway = MANAGEMENT[machine.family].format(254)
        lines += [
            f"address add {machine.management_address}/{prefix} dev mgmt0{nodad}",
            "link set mgmt0 up",
            f"route add default via {gateway} dev mgmt0",
        ]
    lines += [f"address add {machine.address}/{prefix} dev eth0{nodad}", "link set eth0 up"]
    return "".join(f"{line}\n" for line in lines)


def _make_keys(folder: Path) -> None:
    for name in ("host_key", "user_key"):
        if not (folder / name).exists():
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def _start_sshd(machine: Machine, keys: Path) -> None:
    own = machine.path("/root/.ssh")
    own.mkdir(mode=0o700, exist_ok=True)
    for name in ("host_key", "user_key", "user_key.pub"):
        shutil.copy(keys / name, own / name)
    (own / "config").write_text(_SSH_CONFIG, "utf-8")
    (own / "sshd_config").write_text(_SSHD_CONFIG.format(address=machine.address), "utf-8")
    script = f"mkdir -p /run/sshd && exec {SSHD} -f /root/.ssh/sshd_config"
    done = machine.run(["sh", "-c", script], at="/")
    assert done.returncode == 0, f"no sshd: {done.stderr}"


def main(arguments: Iterable[str] | None = None) -> None:
    """Start machines, say how to enter them, and wait for the end of standard input."""
    asked = argparse.ArgumentParser(prog="python -m tests.support.machines.start", description=__doc__)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--number", type=int, default=2)
    asked.add_argument("--share", type=Path, action="append", default=[])
    asked.add_argument("--hosts", choices=["network", "debian"], default="network")
    asked.add_argument("--family", choices=["ipv4", "ipv6"], default="ipv4")
    asked.add_argument("--management", action="store_true")
    asked.add_argument("--ssh", action="store_true")
    chosen = vars(asked.parse_args(None if arguments is None else list(arguments)))
    with machines(chosen.pop("number"), chosen.pop("folder"), **chosen) as made:
        for machine in made:
            print(machine.name, machine.address, *machine.inside(["bash"]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
