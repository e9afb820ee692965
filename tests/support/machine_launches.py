"""Every launcher as commands that start ranks on several machines, and what it lacks where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.launchers import BIN, environment
from tests.support.machines.machine import Family, Machine
from tests.support.programs import reason_no_programs
from tests.support.slurm import reason_no_cluster

PORT = 29400
HOSTFILE = "/tmp/hostfile"

_BY_HAND = """
export WORLD_SIZE={all} MASTER_ADDR={first} MASTER_PORT={port} LOCAL_WORLD_SIZE={per}
local=0 started= code=0
for rank in {ranks}; do
    RANK=$rank LOCAL_RANK=$local "$@" &
    started="$started $!" local=$((local + 1))
done
for pid in $started; do wait $pid || code=1; done
exit $code
"""
_TORCHRUN = ("torchrun", "--nnodes", "{n}", "--nproc-per-node", "{per}")
_C10D = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "{endpoint}")
_MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "{all}", "-H", "{slots}"),
    *("--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"),
    *(
        "-x",
        "PATH",
        "-x",
        "PYTHONPATH",
        "-x",
        "OMP_NUM_THREADS",
        "-x",
        "MASTER_ADDR={first}",
        "-x",
        "MASTER_PORT={port}",
    ),
)
_SRUN = ("srun", "--kill-on-bad-exit", "--nodes", "{n}")

ON_EACH: dict[str, Sequence[str]] = {
    "torchrun c10d": [
        *(*_TORCHRUN, *_C10D, "--rdzv-conf", "is_host={is_first}", "--local-addr", "{mine}", "-m"),
    ],
    "torchrun static": [
        *(*_TORCHRUN, "--node-rank", "{k}", "--master-addr", "{first}", "--master-port", "{port}", "-m"),
    ],
    "accelerate launch": [
        *("accelerate", "launch", "--multi_gpu", "--num_machines", "{n}", "--num_processes", "{all}"),
        *("--machine_rank", "{k}", "--main_process_ip", "{first}", "--main_process_port", "{port}", "-m"),
    ],
    "by hand": ["sh", "-c", _BY_HAND, "sh", sys.executable, "-m"],
}
"""What comes before a module and its arguments, started on each machine."""

ON_FIRST: dict[str, Sequence[str]] = {
    "deepspeed": [
        "deepspeed",
        "--hostfile",
        HOSTFILE,
        "--master_addr",
        "{first}",
        "--master_port",
        "{port}",
        "--module",
    ],
    "mpirun": [*_MPIRUN, sys.executable, "-m"],
    "mpirun cyclic": [*_MPIRUN, "--map-by", "node", sys.executable, "-m"],
    "horovodrun": [
        *("horovodrun", "--gloo", "-np", "{all}", "-H", "{slots}", "--network-interfaces", "eth0"),
        *(sys.executable, "-m"),
    ],
    "srun": [*_SRUN, "--ntasks", "{all}", "--ntasks-per-node", "{per}", sys.executable, "-m"],
    "srun cyclic": [
        *(*_SRUN, "--ntasks", "{all}", "--ntasks-per-node", "{per}", "--distribution", "cyclic", sys.executable, "-m"),
    ],
    "srun torchrun": [*_SRUN, "--ntasks-per-node", "1", str(BIN / _TORCHRUN[0]), *_TORCHRUN[1:], *_C10D, "-m"],
}
"""The same, started on the first machine, from where it reaches the others."""

LAUNCHERS = (*ON_EACH, *ON_FIRST)
EQUAL_MACHINES = ("accelerate launch", "srun", "srun cyclic", "srun torchrun", "mpirun cyclic")
"""Launchers that start as many ranks on one machine as on another."""

IPV4_ALONE = {
    "horovodrun": "horovodrun says: Cannot find an IPv4 address of the common interface",
}


@dataclass(frozen=True)
class Job:
    """Machines of a launch, and how many ranks each has."""

    machines: Sequence[Machine]
    ranks: Sequence[int]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further variables of the environment in which its commands are started."""

    @property
    def size(self) -> int:
        return sum(self.ranks)

    @property
    def env(self) -> dict[str, str]:
        own = {
            "HOME": "/root",
            "TMPDIR": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCH_EXTENSIONS_DIR": "/tmp/compiled",
        }
        return {**environment(), **own, **self.variables}

    def commands(self, launcher: str, module: str, *arguments: str) -> list[tuple[Machine, list[str]]]:
        """Return what is started where, after `prepare`."""
        first = self.machines[0]
        bracketed = f"[{first.address}]" if first.family == "ipv6" else first.address
        common = {
            "n": len(self.machines),
            "all": self.size,
            "first": first.address,
            "endpoint": f"{bracketed}:{PORT}",
            "port": PORT,
            "slots": ",".join(f"{m.name}:{n}" for m, n in zip(self.machines, self.ranks, strict=True)),
        }
        made: list[tuple[Machine, list[str]]] = []
        for k, (machine, per) in enumerate(zip(self.machines, self.ranks, strict=True)):
            before = sum(self.ranks[:k])
            own = {
                "k": k,
                "per": per,
                "mine": machine.address,
                "is_first": int(k == 0),
                "ranks": " ".join(map(str, range(before, before + per))),
            }
            words = [_filled(word, common | own) for word in (ON_EACH | ON_FIRST)[launcher]]
            made.append((machine, [*words, module, *arguments]))
        return made if launcher in ON_EACH else made[:1]

    def prepare(self) -> None:
        """Write what `deepspeed` reads: who there is, and what it hands on over ssh."""
        names = dict.fromkeys(("PATH", "PYTHONPATH", "OMP_NUM_THREADS", *self.variables))
        handed = "".join(f"{name}={self.env[name]}\n" for name in names)
        slots = "".join(f"{m.name} slots={n}\n" for m, n in zip(self.machines, self.ranks, strict=True))
        for machine in self.machines:
            machine.path("/root/.deepspeed_env").write_text(handed, "utf-8")
            machine.path(HOSTFILE).write_text(slots, "utf-8")


OVER_SSH = {
    "deepspeed": ("sshd", "ssh", "pdsh"),
    "horovodrun": ("sshd", "ssh"),
    "mpirun": ("sshd", "ssh", "mpirun"),
    "mpirun cyclic": ("sshd", "ssh", "mpirun"),
}
"""Launchers that start ranks on other machines over ssh, and the programs that they need."""


def needs_slurm(launcher: str) -> bool:
    return launcher.startswith("srun")


def reason_not_here(launcher: str, ranks: Sequence[int] = (1, 1), family: Family = "ipv4") -> str:
    """Why it cannot start these ranks on machines here; empty: it can."""
    if needs_slurm(launcher) and (why := reason_no_cluster()):
        return why
    if why := reason_no_programs(*OVER_SSH.get(launcher, ())):
        return why
    if launcher in EQUAL_MACHINES and len(set(ranks)) > 1:
        return "it starts as many ranks on each machine"
    return IPV4_ALONE.get(launcher, "") if family == "ipv6" else ""


def _filled(word: str, fields: Mapping[str, object]) -> str:
    for name, value in fields.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word
