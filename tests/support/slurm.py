"""A Slurm cluster of one machine, in a network and a process table of its own: `with cluster(folder) as slurm`.

    python -m tests.support.slurm FOLDER GPUS       is its first process, and ends all others by ending

Needs root, and Debian's slurmctld, slurmd, slurm-client and munge. Nothing of it is seen or heard outside.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.private import CLONE_NEWNS, CLONE_NEWPID, add_loopback_address, enter_private_network, unshare
from tests.support.programs import find_program, reason_no_programs

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
ADDRESS = "10.213.0.1"
PATIENCE = 30.0

CONFIG = """
ClusterName=one
SlurmctldHost={host}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdTimeout={silence}
JobRequeue=1
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def reason_no_cluster() -> str:
    """Why there can be no cluster here; empty: there can."""
    if why := reason_no_programs(*PROGRAMS):
        return why
    return "" if os.getuid() == 0 else "a Slurm cluster is started by root only"


@contextmanager
def cluster(folder: Path, gpus: int = 0) -> Generator[Slurm]:
    """Up when the body begins, gone when it has ended; `gpus`: number of GPUs that Slurm believes in."""
    first = subprocess.Popen(
        [sys.executable, "-m", "tests.support.slurm", str(folder), str(gpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    try:
        said = first.stdout.readline().split()
        assert said[:1] == ["ready"], f"no cluster: {said}; its logs are in {folder}"
        yield Slurm(int(said[1]), folder)
    finally:
        first.stdin.close()
        first.wait()
        first.stdout.close()


class Slurm:
    """A cluster that runs."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def inside(self, words: list[str]) -> list[str]:
        """The command that runs `words` in it."""
        return ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", "--wd=.", "--", *words]


def write_cluster_files(
    folder: Path,
    nodes: Sequence[tuple[str, str]],
    key: bytes,
    *,
    seen_as: str | None = None,
    silence: int = 300,
    more: str = "",
    gpus: int = 0,
) -> None:
    """Write what the daemons of one machine read into their folder; slurmctld is on the first of (name, address).

    `seen_as`: path of the folder for the daemons, if another. `silence`: seconds after which a node that does not
    answer is lost, and its jobs end.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").touch(0o400)
    os.chmod(folder / "munge.key", 0o600)
    (folder / "munge.key").write_bytes(key)
    host, address = nodes[0]
    cpus = max(2, os.cpu_count() or 2)
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines = "\n".join(f"NodeName={host} NodeAddr={address} CPUs={cpus}{gres}" for host, address in nodes)
    if gpus:
        more += "\nGresTypes=gpu"
        for number in range(gpus):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n", encoding="utf-8")
    text = CONFIG.format(host=host, address=address, folder=seen_as or folder, nodes=lines, silence=silence, more=more)
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")


def munged_command(folder: Path) -> list[str]:
    """Return the command that vouches for who sends, in the foreground."""
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    program = find_program("munged")
    assert program is not None
    return [program, "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in munge.items())]


def _run_first_process(folder: Path, gpus: int) -> None:
    """Outside: makes the process table, and waits for the end of the one who is first in it."""
    folder.mkdir(parents=True, exist_ok=True)
    unshare(CLONE_NEWNS | CLONE_NEWPID)
    enter_private_network()
    add_loopback_address(ADDRESS)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _begin(folder, gpus)
        os.write(writer, b"!")
        sys.stdin.read()
        os._exit(0)  # and the kernel ends every process of this table
    os.close(writer)
    said = f"ready {pid}" if os.read(reader, 1) else "failed"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    os.waitpid(pid, 0)


def _begin(folder: Path, gpus: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    private = 1 << 14 | 1 << 18
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
    write_cluster_files(folder, [(socket.gethostname(), ADDRESS)], secrets.token_bytes(128), gpus=gpus)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    _start(folder, *munged_command(folder))
    _wait_until((folder / "munge.socket").exists)
    _start(folder, "slurmctld", "-D")
    _wait_until(_listens)  # a node that comes too early comes again half a minute later
    _start(folder, "slurmd", "-D")
    _wait_until(_idle)


def _start(folder: Path, name: str, *options: str) -> None:
    program = find_program(name)
    assert program is not None
    with (folder / f"{Path(name).name}.out").open("w", encoding="utf-8") as out:
        subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)


def _wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > until:
            sys.stderr.write(f"no {true} within {PATIENCE:g} s\n")
            os._exit(1)
        time.sleep(0.02)


def _listens() -> bool:
    try:
        socket.create_connection((ADDRESS, 6817)).close()
    except OSError:
        return False
    return True


def _idle() -> bool:
    asked = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "idle"


if __name__ == "__main__":
    _run_first_process(Path(sys.argv[1]), int(sys.argv[2]))
