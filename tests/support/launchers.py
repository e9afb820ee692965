"""Every launcher as a command that starts two ranks on this machine, and what it lacks where it cannot."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import slurm
from tests.support.programs import PACKAGES, reason_no_programs
from tests.support.world import PYTHONPATH_VARIABLE

BIN = Path(sys.executable).parent

_BY_HAND = """
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
RANK=0 "$@" & first=$!
RANK=1 "$@" & second=$!
wait $first && wait $second
"""

LAUNCH_COMMANDS: dict[str, Sequence[str]] = {
    "python": [sys.executable, "-m"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m"],
    "accelerate launch": [
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2"),
        *("--main_process_port", "{port}", "-m"),
    ],
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "{port}", "--module"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "2", sys.executable, "-m"],
    "mpirun": [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo"),
        *("-np", "2", sys.executable, "-m"),
    ],
    "srun": ["srun", "--kill-on-bad-exit", "--ntasks", "2", sys.executable, "-m"],
    "by hand": ["sh", "-c", _BY_HAND, "sh", sys.executable, "-m"],
}
"""What comes before a module and its arguments."""

SIZED_BY_CONFIG = ("python",)
"""Those that are told the number of ranks by the config alone."""


ABSENT = Path(__file__).parent / "absent"
"""Modules that take long to import, in the place of those that are installed."""


def reason_missing(launcher: str) -> str:
    """Why it cannot be had here; empty: it can."""
    if launcher == "srun":
        return slurm.reason_no_cluster()
    program = LAUNCH_COMMANDS[launcher][0]
    if shutil.which(program, path=environment()["PATH"]) is not None:
        return ""
    return reason_no_programs(program) if program in PACKAGES else f"no {program}"


def environment(temporary: Path | None = None) -> dict[str, str]:
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    modules = os.pathsep.join([PYTHONPATH_VARIABLE["PYTHONPATH"], str(ABSENT)])
    made = {**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "PATH": path}
    return made if temporary is None else {**made, "TMPDIR": str(temporary)}


def launch_command(launcher: str, module: str, *arguments: str) -> list[str]:
    """`module` in two ranks, in a network of the command's own where that can be had."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    made = [word.replace("{port}", port) for word in LAUNCH_COMMANDS[launcher]]
    size = ["--set", "parallel.data=2"] if launcher in SIZED_BY_CONFIG else []
    return in_private_network([*made, module, *arguments, *size])


def in_private_network(command: Sequence[str]) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / "private.py"), *command]
