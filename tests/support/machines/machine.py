"""One machine of `machines(...)`: what can be run on it, and what can happen to it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tests.support.programs import reason_no_programs

Family = Literal["ipv4", "ipv6"]

ADDRESSES: dict[Family, str] = {"ipv4": "10.213.7.{}", "ipv6": "fd00:213:7::{}"}
MANAGEMENT: dict[Family, str] = {"ipv4": "10.213.8.{}", "ipv6": "fd00:213:8::{}"}
PREFIX: dict[Family, int] = {"ipv4": 24, "ipv6": 64}

SWITCH = 0
"""Number of the namespace that holds the switch and no processes."""

_NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")


def name_of(number: int) -> str:
    return f"node{number}" if number != SWITCH else "switch"


@dataclass(frozen=True)
class Machine:
    """A machine that runs."""

    number: int
    """1, 2, 3, ..."""

    family: Family
    folder: Path
    """What this machine holds on its disk, seen from outside, also when it is off."""

    pid: int
    """Process number, seen from outside, of its first process: every other one ends when that does."""

    switch: int
    """The same of the namespace that holds the switch."""

    @property
    def name(self) -> str:
        return name_of(self.number)

    @property
    def address(self) -> str:
        return ADDRESSES[self.family].format(self.number)

    @property
    def management_address(self) -> str:
        """Address in the second network, if the machines were started with one."""
        return MANAGEMENT[self.family].format(self.number)

    def path(self, inside: str) -> Path:
        """Return where a file below its /tmp or /root is seen from outside."""
        _, top, *rest = Path(inside).parts
        assert top in ("tmp", "root"), f"{inside} is not on this machine's own disk"
        return self.folder.joinpath(top, *rest)

    def inside(self, words: Sequence[str], *, at: str = "/tmp") -> list[str]:
        """Return the command that runs `words` on this machine."""
        return ["nsenter", "--target", str(self.pid), *_NAMESPACES, f"--wdns={at}", "--", *words]

    def run(
        self, words: Sequence[str], *, at: str = "/tmp", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it to its end."""
        return subprocess.run(self.inside(words, at=at), env=env, capture_output=True, text=True, check=False)

    def start(
        self, words: Sequence[str], log: Path, *, env: Mapping[str, str], at: str = "/tmp"
    ) -> subprocess.Popen[bytes]:
        """Start a command on it, in a session of its own; `log` is a file outside."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.inside(words, at=at),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    def processes(self) -> dict[int, str]:
        """Return the command lines of all that runs on it, besides its first process."""
        try:
            own = os.readlink(f"/proc/{self.pid}/ns/pid")
        except FileNotFoundError:
            return {}  # it is off
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if words and os.readlink(entry / "ns/pid") == own:
                    found[int(entry.name)] = words.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def pull_cable(self) -> None:
        """The link goes down at the switch: nobody is told, connections stay open and silent."""
        in_network(self.switch, "ip", "link", "set", port(self.number), "down")

    def plug_cable(self) -> None:
        in_network(self.switch, "ip", "link", "set", port(self.number), "up")

    def power_off(self) -> None:
        """Every process of it ends at once, and its connections with them; its disk can be read from outside."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def drop_packets_from(self, other: Machine) -> None:
        """A firewall that says nothing: what `other` sends is dropped, not refused, and so are answers to it."""
        family = "ip6" if self.family == "ipv6" else "ip"
        if reason_no_firewall():  # a route that leads nowhere stops at least what this machine sends
            in_network(self.pid, "ip", "route", "add", "blackhole", other.address)
            return
        self._drop(f"{family} saddr {other.address} drop")

    def lose_packets(self, percent: int) -> None:
        """A bad wire: so many of the packets that arrive are lost at random; see `reason_no_firewall`."""
        self._drop(f'iifname "eth0" numgen random mod 100 < {percent} drop')

    def delay_packets(self, milliseconds: int) -> None:
        """A long wire: each packet that leaves waits; see `reason_no_delay`."""
        in_network(self.pid, "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", f"{milliseconds}ms")

    def _drop(self, rule: str) -> None:
        in_network(self.pid, "nft", "add table inet wire")
        in_network(self.pid, "nft", "add chain inet wire arrives { type filter hook input priority 0; }")
        in_network(self.pid, "nft", f"add rule inet wire arrives {rule}")


def port(number: int) -> str:
    """Return the name of a machine's port at the switch."""
    return f"port{number}"


def in_network(pid: int, *words: str, text: str | None = None) -> None:
    """Run a command in the network of a process, with the files of this one."""
    command = ["nsenter", "--target", str(pid), "--net", "--", *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{text or ''}"


@cache
def reason_no_firewall() -> str:
    """Why no packets can be dropped by a rule here; empty: they can."""
    rules = "nft add table inet t && nft add chain inet t c '{ type filter hook input priority 0; }'"
    return _reason(f"{rules} && nft add rule inet t c numgen random mod 100 '<' 1 drop", "nft")


@cache
def reason_no_delay() -> str:
    """Why packets cannot be made to wait here; empty: they can."""
    return _reason("tc qdisc add dev lo root netem delay 1ms", "tc")


def _reason(script: str, program: str) -> str:
    if why := reason_no_programs(program):
        return why
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    return f"`{script}`: {' '.join(done.stderr.split())}" if done.returncode else ""
