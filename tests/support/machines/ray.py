"""A Ray cluster over several machines: `with ray_over(machines, env) as address`; its head is on the first.

Needs an environment that has Ray: tests.support.ray_environment. Nothing is shared: each raylet has sockets, logs and
objects on its machine's own disk and in its memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from tests.support.machines.machine import Machine

PATIENCE = 120.0
HEAD_PORT, DASHBOARD_PORT = 6379, 8265
_START = (
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
    *("--num-cpus=1", "--object-store-memory=80000000"),
)
_COUNT = f"""
import json, urllib.request
said = urllib.request.urlopen("http://{{}}:{DASHBOARD_PORT}/nodes?view=summary", timeout=5).read()
print(sum(node["raylet"].get("state") == "ALIVE" for node in json.loads(said)["data"]["summary"]))
"""


@contextmanager
def ray_over(machines: Sequence[Machine], env: Mapping[str, str]) -> Generator[str]:
    """Up, with one core a machine, when the body begins; yields the address of its dashboard."""
    head, *others = machines
    with ExitStack() as ends:
        _start(ends, head, env, "--head", f"--port={HEAD_PORT}", "--dashboard-host", head.address)
        _wait_until(lambda: count_nodes(head, env) == 1, f"no head; see {head.path('/tmp/ray.out')}")
        for machine in others:
            _start(ends, machine, env, f"--address={head.address}:{HEAD_PORT}")
        _wait_until(lambda: count_nodes(head, env) == len(machines), "not all raylets are alive")
        yield f"http://{head.address}:{DASHBOARD_PORT}"


def count_nodes(head: Machine, env: Mapping[str, str]) -> int:
    """Return how many raylets are alive, as the dashboard says; 0 where it says nothing yet."""
    done = head.run([sys.executable, "-c", _COUNT.format(head.address)], env=env)
    return int(done.stdout or 0)


def _start(ends: ExitStack, machine: Machine, env: Mapping[str, str], *more: str) -> None:
    words = [*_START, f"--node-ip-address={machine.address}", *more]
    ends.callback(_end, machine.start(words, machine.path("/tmp/ray.out"), env=env))


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # its machine may be off
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until(true: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, otherwise
        time.sleep(0.5)
