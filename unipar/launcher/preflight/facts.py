"""`MachineFacts`: what a machine says of itself before a run: versions, code, processor, GPUs, network, limits."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from unipar.backend.checks import read_source
from unipar.backend.installed import installed_versions, machine_summary
from unipar.backend.registry import backend_names, find_backend, why_not_installed
from unipar.backend.resources import choose_device
from unipar.distributed.addresses import address_of_interface, is_ipv6
from unipar.distributed.interfaces import mtu_of_interface, speed_of_interface
from unipar.distributed.machine_checks import MachineCheck, check_limits, check_shared_memory
from unipar.errors import UniparError
from unipar.launcher.machines.start import code_digests, section_digests
from unipar.task.reference import TaskRef

if TYPE_CHECKING:
    from unipar.backend.checks import CheckedSource

_INSTRUCTIONS: Final = ("avx", "avx2", "avx512f", "amx_tile", "asimd", "sve")
"""Flags of /proc/cpuinfo that decide for which processor an extension is compiled."""


@dataclass(frozen=True)
class ConfigFacts:
    """Meaning of a config on a machine."""

    error: str = ""
    """Why it cannot be read, or names what is not there; empty: it is all right."""

    sections: dict[str, str] = field(default_factory=dict[str, str])
    """Digest of each section that must be the same everywhere."""

    code: dict[str, str] = field(default_factory=dict[str, str])
    """Digest of each file of the task."""

    device: str = ""
    """`cpu`, `cuda` or `cuda:N`."""

    backend: str = ""
    missing: str = ""
    """Why the backend's library cannot be loaded; empty: it can."""

    modules: list[str] = field(default_factory=list[str])
    """Modules of that library."""

    per: int | None = None
    """Ranks that are to run on each machine, if the config says so."""

    folder: str = "auto"
    """`machines.folder`: whether the run folder is to be shared."""


@final
@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Description that a machine gives of itself."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Version of each library, of Python, of NCCL and of the CUDA driver, where they are there."""

    cpu: str = ""
    instructions: list[str] = field(default_factory=list[str])
    """Vector instructions of the processor."""

    gpus: list[str] = field(default_factory=list[str])
    """Name of each GPU that torch sees."""

    own_address: str = ""
    """Address that the machine's own name means to itself; empty: it does not resolve."""

    interface: str = ""
    """Interface over which it reaches the others; empty: not known."""

    mtu: int | None = None
    speed: int | None = None
    """Of its link, in Mbit/s; None: not told."""

    missing_interface: str = ""
    """`machines.interface`, if there is no such one here."""

    interfaces: list[str] = field(default_factory=list[str])
    """Names of all interfaces."""

    limits: list[MachineCheck] = field(default_factory=list[MachineCheck])
    """Checks of this machine's limits that are not ok."""

    config: ConfigFacts | None = None
    """None: no config was given."""


def find_missing_interface(chosen: str | None, peer: str) -> str:
    """Return the interface that a config names if it has no address here of the kind of `peer`, else ""."""
    if chosen is None or address_of_interface(chosen, ipv6=is_ipv6(peer)) is not None:
        return ""
    return chosen


def collect_facts(interface: str | None, missing_interface: str, config: ConfigFacts | None) -> MachineFacts:
    """Return the facts of this machine, whose ranks have met; imports torch and no other library."""
    from unipar.distributed.device import list_device_names, transport_version

    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":")[1].split()}
    versions = installed_versions(backend_names()) | transport_version() | _driver_version()
    versions["python"] = versions["python"].rpartition(".")[0]
    return MachineFacts(
        versions=versions,
        cpu=machine_summary()["cpu"],
        instructions=[flag for flag in _INSTRUCTIONS if flag in flags],
        gpus=list_device_names(),
        own_address=_own_address(),
        interface=interface or "",
        mtu=None if interface is None else mtu_of_interface(interface),
        speed=None if interface is None else speed_of_interface(interface),
        missing_interface=missing_interface,
        interfaces=[name for _, name in socket.if_nameindex()],
        limits=[check for check in _limits() if check.status != "ok"],
        config=config,
    )


def _limits() -> Iterator[MachineCheck]:
    yield from check_limits()
    yield check_shared_memory(Path("/dev/shm"))


def _driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> dict[str, str]:
    if not file.exists():
        return {}
    match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", file.read_text("utf-8", "replace"))
    return {"CUDA driver": match[1]} if match else {}


def _own_address() -> str:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def read_config_facts(file: Path, out: str | None) -> tuple[CheckedSource | None, ConfigFacts]:
    """Return a config, or None if it cannot be read, and what it means on this machine."""
    try:
        source = read_source(file, ())
    except (UniparError, OSError) as e:
        return None, ConfigFacts(error=str(e))
    if out is not None:
        source = source.with_out(out)
    config, error, code = source.config, "", dict[str, str]()
    backend = find_backend(config.backend)
    if config.task is not None and config.task.use is not None:
        try:
            ref = TaskRef.of(None, config.task, {})
            ref.check_code()
            code = code_digests(ref)
        except (UniparError, OSError) as e:
            error = str(e)
    machines = config.machines
    per = machines.ranks_per_node if machines is not None else None
    return source, ConfigFacts(
        error=error,
        sections=section_digests(config.model_dump(mode="json")),
        code=code,
        device=choose_device(config)[0],
        backend=backend.name,
        missing=why_not_installed(backend) or "",
        modules=sorted(backend.requires),
        per=per if isinstance(per, int) else None,
        folder=machines.folder if machines is not None else "auto",
    )
