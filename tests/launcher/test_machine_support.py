"""What the machines of tests are: what they share, what they do not, what can happen to them, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.machine_faults import is_rank
from tests.support.machines.clock import reason_no_wrong_clock, wrong_clock
from tests.support.machines.machine import Machine, reason_no_firewall
from tests.support.machines.start import hosts_file, machines, reason_no_machines
from tests.support.programs import skip_because
from tests.support.world import PYTHONPATH_VARIABLE, ROOT, SOON, eventually, is_running

pytestmark = skip_because(reason_no_machines())

SERVER = (
    "import socket; s = socket.create_server(('{}', 5000)); print('up', flush=True)\nwhile 1: s.accept()[0].close()"
)
CLIENT = "import socket; socket.create_connection(('{}', 5000), 1); print('connected')"

SENDER = """
import socket, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(400):
    udp.sendto(b"x", ("{}", 5000))
    time.sleep(0.001)
"""
COUNTER = """
import socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("{}", 5000))
print("up", flush=True)
udp.recv(9)
udp.settimeout(1)
count = 1
try:
    while True:
        udp.recv(9)
        count += 1
except TimeoutError:
    print(count)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def pair(tmp_path: Path, shared: Path) -> Generator[tuple[Machine, Machine]]:
    with machines(2, tmp_path / "machines", share=[shared]) as (first, second):
        yield first, second


def said(machine: Machine, script: str) -> str:
    done = machine.run(["sh", "-c", script])
    return done.stdout + done.stderr


def connects(one: Machine, other: Machine) -> bool:
    return one.run([sys.executable, "-c", CLIENT.format(other.address)]).stdout == "connected\n"


def test_what_is_shared(pair: tuple[Machine, Machine], shared: Path) -> None:
    """A folder that is named, and code that nobody can write to; not /tmp, /root, /dev/shm, boot id or host name."""
    first, second = pair
    assert said(first, "echo 1 > /tmp/a; echo 1 > /root/a; echo 1 > /dev/shm/a; hostname") == "node1\n"
    assert said(second, "ls /tmp/a /root/a /dev/shm/a 2>/dev/null; hostname") == "node2\n"
    assert first.path("/tmp/a").read_text("utf-8") == "1\n"
    assert not Path("/tmp/a").exists()
    assert said(first, f"echo 1 > {shared}/a") == ""
    assert said(second, f"cat {shared}/a") == "1\n"
    assert "Read-only file system" in said(first, f"touch {ROOT}/a")
    assert "Read-only file system" in said(first, "touch /usr/a")
    boot = "cat /proc/sys/kernel/random/boot_id"
    assert len({said(first, boot), said(second, boot), Path("/proc/sys/kernel/random/boot_id").read_text("utf-8")}) == 3


def test_cable_and_firewall(pair: tuple[Machine, Machine], tmp_path: Path) -> None:
    """A connection is possible; not while the cable is out, nor behind a firewall."""
    first, second = pair
    log = tmp_path / "log"
    serves = second.start([sys.executable, "-c", SERVER.format(second.address)], log, env=os.environ)
    eventually(lambda: "up" in log.read_text("utf-8"), "no server")
    assert connects(first, second)
    second.pull_cable()
    assert not connects(first, second)
    second.plug_cable()
    assert connects(first, second)
    second.drop_packets_from(first)
    assert not connects(first, second)
    second.power_off()
    assert serves.wait(SOON) != 0
    assert second.processes() == {}


def test_packets_are_lost(pair: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Some of 400 datagrams, and not all of them."""
    if why := reason_no_firewall():
        pytest.skip(why)
    first, second = pair
    second.lose_packets(30)
    log = tmp_path / "log"
    counting = second.start([sys.executable, "-c", COUNTER.format(second.address)], log, env=os.environ)
    eventually(lambda: "up" in log.read_text("utf-8"), "nobody counts")
    assert first.run([sys.executable, "-c", SENDER.format(second.address)]).stderr == ""
    counting.wait(SOON)
    assert 200 < int(log.read_text("utf-8").split()[1]) < 360


def test_wrong_clock(pair: tuple[Machine, Machine]) -> None:
    """90 seconds ahead in programs, and the monotonic clock is right."""
    if why := reason_no_wrong_clock():
        pytest.skip(why)
    first, _ = pair
    code = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    done = first.run([sys.executable, "-c", code], env={**os.environ, **wrong_clock(first, 90)})
    wrong = [float(word) for word in done.stdout.split()]
    assert [w - right for w, right in zip(wrong, [time.time(), time.time(), time.monotonic()], strict=True)] == [
        pytest.approx(90, abs=5),
        pytest.approx(90, abs=5),
        pytest.approx(0, abs=5),
    ]


def test_management_network(tmp_path: Path) -> None:
    """This network has the first interface, the default route and the own name, and leads to no other machine."""
    with machines(2, tmp_path, management=True) as (first, second):
        shown = said(first, "ip -brief -4 address")
        names = [line.split("@")[0].split()[0] for line in shown.splitlines()]
        assert names == ["lo", "mgmt0", "eth0"]
        assert said(first, "getent hosts node1 node2").split() == ["10.213.8.1", "node1", "10.213.7.2", "node2"]
        reach = "import socket; s = socket.create_connection(('{}', 5000), 1)"
        assert "refused" in first.run([sys.executable, "-c", reach.format("10.213.7.2")]).stderr
        assert "refused" not in first.run([sys.executable, "-c", reach.format("10.213.8.2")]).stderr
        assert second.management_address == "10.213.8.2"


def test_hosts_files() -> None:
    """Own name first, then the others."""
    assert hosts_file(2, "debian", "ipv4", False).splitlines()[:4] == [
        "127.0.0.1 localhost",
        "::1 localhost",
        "127.0.1.1 node2",
        "10.213.7.1 node1",
    ]
    assert "fd00:213:7::2 node2" in hosts_file(2, "network", "ipv6", False)


def test_machines_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also after kill -9, with all that runs on them."""
    words = [sys.executable, "-m", "tests.support.machines.start", str(tmp_path), "--number", "1"]
    environment = {**os.environ, **PYTHONPATH_VARIABLE}
    starts = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert starts.stdin is not None
    assert starts.stdout is not None
    line = starts.stdout.readline().split()
    assert line[:3] == ["node1", "10.213.7.1", "nsenter"]
    sleeps = subprocess.Popen([*line[2:-1], "sleep", "1000"])
    first = int(line[line.index("--target") + 1])
    eventually(lambda: sleeps.poll() is None and is_running(first), "no machine")
    starts.send_signal(signal.SIGKILL)
    starts.wait()
    starts.stdin.close()
    starts.stdout.close()
    assert sleeps.wait(SOON) != 0
    eventually(lambda: not is_running(first), "the machine outlives its test", SOON)


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("/venv/bin/python -u -m unipar run x.yaml --backend native", True),
        ("/usr/bin/python3.11 -m unipar run x.yaml", True),
        ("/venv/bin/python /venv/bin/torchrun --nnodes 2 -m unipar run x.yaml", False),
        ("nsenter --target 7 -- /venv/bin/python -m unipar run x.yaml", False),
        ("sh -c ... sh /venv/bin/python -m unipar run x.yaml", False),
    ],
)
def test_what_is_a_rank(line: str, rank: bool) -> None:
    """By its command line; not what starts it."""
    assert is_rank(line) == rank
