"""Judgement of all machines' facts: a check for each thing that can differ or fail, with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from unipar.distributed.addresses import is_loopback
from unipar.distributed.machine_checks import MachineCheck
from unipar.launcher.preflight.facts import ConfigFacts, MachineFacts
from unipar.launcher.preflight.network import SECONDS_TO_CONNECT, NetworkFacts
from unipar.launcher.preflight.run_folder import FolderFacts
from unipar.utils.text import count_of, first_few, format_duration, format_rate, format_size

_MUST_AGREE: Final = ("python", "unipar", "torch", "numpy", "NCCL")
"""Versions that a run compares, too, or on which its ranks depend together; besides the backend's library."""

_MOST_SECONDS_APART: Final = 1.0
_MOST_SECONDS_OF_C10D: Final = 15.0
"""Seconds after which torchrun's c10d rendezvous takes a machine for dead, by the clocks of both (its default)."""

_SLOW_LINK: Final = 1000
"""Speed of a link in Mbit/s below which training over it waits for the network."""

_SLOW_SECONDS: Final = 0.005
_SLOW_BYTES: Final = 50e6
_LEAST_FREE: Final = 2**30

_SAME_FILES: Final = "copy the same files to all machines"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of a machine about itself and its way to the others."""

    facts: MachineFacts = field(default_factory=MachineFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    folder: FolderFacts | None = None
    """None: no config was given."""

    error: str = ""
    """Why it could not look; empty: it could."""


@dataclass(frozen=True, kw_only=True)
class ExaminedMachine(Findings):
    """A machine with all that was found out about it."""

    name: str
    """Its host name, with its address where two machines have the same one."""

    address: str


def judge_machines(machines: Sequence[ExaminedMachine]) -> list[MachineCheck]:
    """Return all checks, those that are ok as well; the first machine is that of rank 0."""
    checks: list[MachineCheck] = []
    for judge in (
        _judge_configs,
        _judge_versions,
        _judge_backend,
        _judge_devices,
        _judge_processors,
        _judge_clocks,
        _judge_names,
        _judge_interfaces,
        _judge_ports,
        _judge_all_reduce,
        _judge_folder,
        _judge_limits,
    ):
        checks += judge(machines)
    return checks


def describe_values(machines: Sequence[ExaminedMachine], value: Callable[[ExaminedMachine], str]) -> str:
    """Return each value with the machines that have it: `2.13.0 on node1; 2.12.0 on node2 and node3`."""
    owners: dict[str, list[str]] = {}
    for machine in machines:
        owners.setdefault(value(machine), []).append(machine.name)
    return "; ".join(f"{text} on {_names(names)}" for text, names in owners.items())


def _names(names: Sequence[str]) -> str:
    if len(names) > 3:
        return first_few(names)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _differ(values: Sequence[object]) -> bool:
    return any(value != values[0] for value in values)


def _configs(machines: Sequence[ExaminedMachine]) -> list[tuple[ExaminedMachine, ConfigFacts]]:
    return [(machine, machine.facts.config) for machine in machines if machine.facts.config is not None]


def _judge_configs(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    configs = _configs(machines)
    if not configs:
        return
    broken = [(machine, config) for machine, config in configs if config.error]
    for error in dict.fromkeys(config.error for _, config in broken):
        names = _names([machine.name for machine, config in broken if config.error == error])
        everywhere = len(broken) == len(machines) and len({config.error for _, config in broken}) == 1
        finding = error if everywhere else f"{names}: {error}"
        yield MachineCheck("config", "fail", finding, "correct it" if everywhere else _SAME_FILES)
    valid = [(machine, config) for machine, config in configs if not config.error]
    if len(valid) < 2:
        return
    sections = [(machine.name, config.sections) for machine, config in valid]
    code = [(machine.name, config.code) for machine, config in valid]
    differing = [
        *(("config", sentence) for sentence in _other_digests("the config's section {}", sections)),
        *(("code", sentence) for sentence in _other_digests("the file {}", code)),
    ]
    for name, sentence in differing:
        yield MachineCheck(name, "fail", sentence, _SAME_FILES)
    if not differing and not broken:
        yield MachineCheck("config", "ok", "config and task")


def _other_digests(kind: str, rows: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """Yield a sentence for each name whose digest on some machine is not the first machine's."""
    first, digests = rows[0]
    for name in dict.fromkeys(name for _, row in rows for name in row):
        if others := [machine for machine, row in rows if row.get(name) != digests.get(name)]:
            yield f"{kind.format(name)} on {_names(others)} is not that of {first}"


def _judge_versions(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    needed = {*_MUST_AGREE, *(module for _, config in _configs(machines) for module in config.modules)}
    same: list[str] = []
    for name in dict.fromkeys(name for machine in machines for name in machine.facts.versions):
        versions = [machine.facts.versions.get(name) for machine in machines]
        if not _differ(versions):
            same.append(f"{name} {versions[0]}")
            continue
        finding = describe_values(machines, lambda machine: machine.facts.versions.get(name, "missing"))  # noqa: B023
        remedy = "install one version on all machines"
        if name not in needed:
            remedy += ", if the run needs it"
        yield MachineCheck(name, "fail" if name in needed else "warn", finding, remedy)
    if same:
        yield MachineCheck("versions", "ok", ", ".join(same))


def _judge_backend(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    configs = _configs(machines)
    for why in dict.fromkeys(config.missing for _, config in configs if config.missing):
        names = _names([machine.name for machine, config in configs if config.missing == why])
        sentence, _, remedy = why.rpartition(": ")
        yield MachineCheck(f"backend {configs[0][1].backend}", "fail", f"{names}: {sentence or why}", remedy)


def _judge_devices(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    for machine, config in _configs(machines):
        gpus, wanted = len(machine.facts.gpus), config.per or 1
        kind, _, index = config.device.partition(":")
        if kind not in ("", "cpu") and (gpus < wanted if not index else gpus <= int(index)):
            asked = f"device: {config.device}" + ("" if index else f" for {count_of(wanted, 'rank')}")
            finding = f"{machine.name}: {asked}, and torch sees {count_of(gpus, 'GPU')} there"
            yield MachineCheck("device", "fail", finding, "leave that machine out, or set device: cpu")
    devices = [config.device for _, config in _configs(machines) if config.device]
    if devices and _differ(devices):
        finding = describe_values(machines, lambda m: (m.facts.config.device if m.facts.config else "") or "unknown")
        yield MachineCheck("device", "fail", finding, "set device: cpu or cuda, or leave the odd machine out")
    if _differ([machine.facts.gpus for machine in machines]):
        finding = describe_values(machines, lambda machine: _describe_gpus(machine.facts.gpus))
        yield MachineCheck("GPUs", "warn", finding, "the slowest GPU sets the pace: take equal machines")
    else:
        yield MachineCheck("GPUs", "ok", _describe_gpus(machines[0].facts.gpus))


def _describe_gpus(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds) or "no GPU"


def _judge_processors(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    if _differ([machine.facts.instructions for machine in machines]):
        finding = describe_values(machines, lambda machine: " ".join(machine.facts.instructions) or "no vectors")
        remedy = (
            "code compiled on one may end with SIGILL on another: set TORCH_EXTENSIONS_DIR to a folder of each "
            "machine's own, such as /tmp/compiled"
        )
        yield MachineCheck("CPU", "warn", finding, remedy)
    elif _differ([machine.facts.cpu for machine in machines]):
        finding = describe_values(machines, lambda machine: machine.facts.cpu)
        yield MachineCheck("CPU", "warn", finding, "the slowest sets the pace: take equal machines where it matters")
    else:
        yield MachineCheck("CPU", "ok", "CPU")


def _judge_clocks(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    wrong = False
    for machine in machines[1:]:
        ahead = machine.network.ahead
        if abs(ahead) > _MOST_SECONDS_APART + machine.network.uncertainty:
            wrong = True
            way = "ahead of" if ahead > 0 else "behind"
            finding = f"{machine.name} is {format_duration(abs(ahead))} {way} {machines[0].name}"
            remedy = "set it by a time service (timedatectl set-ntp true, or chronyd): times in logs do not compare"
            if abs(ahead) > _MOST_SECONDS_OF_C10D:
                remedy += ", and torchrun --rdzv-backend c10d takes the other machine for dead and never starts"
            yield MachineCheck("clock", "warn", finding, remedy)
    if not wrong:
        most = max(abs(machine.network.ahead) + machine.network.uncertainty for machine in machines)
        yield MachineCheck("clock", "ok", f"clocks within {format_duration(most)}")


def _judge_names(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    lost = [machine for machine in machines if not machine.facts.own_address]
    for machine in lost:
        remedy = f"add the line '{machine.address} {machine.name.split()[0]}' to its /etc/hosts"
        finding = f"{machine.name} does not resolve its own name; launchers other than unipar's may fail"
        yield MachineCheck("own name", "warn", finding, remedy)
    inside = [machine for machine in machines if machine.facts.own_address and is_loopback(machine.facts.own_address)]
    if inside:
        finding = "; ".join(f"{machine.name} is {machine.facts.own_address} to itself" for machine in inside[:3])
        finding += f"; so are {len(inside) - 3} more" if len(inside) > 3 else ""
        remedy = (
            "unipar finds the right address; torchrun's c10d rendezvous needs --rdzv-conf is_host=1 on the first "
            "machine and --local-addr ADDRESS on each, or else --node-rank and --master-addr"
        )
        yield MachineCheck("own name", "warn", finding, remedy)
    if not lost and not inside:
        yield MachineCheck("own name", "ok", "own names resolve")


def _judge_interfaces(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    for machine in machines:
        if name := machine.facts.missing_interface:
            finding = f"machines.interface: {name} has no address on {machine.name}"
            remedy = f"name another; there are {', '.join(machine.facts.interfaces)}"
            yield MachineCheck("interface", "fail", finding, remedy)
    name = machines[0].facts.interface or "its interface"
    same_mtu = not _differ([machine.facts.mtu for machine in machines])
    if not same_mtu:
        finding = "largest packet (MTU): " + describe_values(machines, lambda m: f"{m.facts.mtu} bytes" + _at(m))
        most = max(machine.facts.mtu or 0 for machine in machines)
        remedy = (
            f"ip link set {name} mtu {most} on all machines; where packets are too large for one, a run hangs at its "
            "first large tensor"
        )
        yield MachineCheck("MTU", "warn", finding, remedy)
    speeds = [machine.facts.speed for machine in machines]
    slow = any(speed is not None and speed < _SLOW_LINK for speed in speeds)
    if _differ(speeds) or slow:
        finding = describe_values(machines, lambda machine: _speed_text(machine.facts.speed) + _at(machine))
        remedy = "name a faster network (machines.interface), or look at cable and switch"
        yield MachineCheck("link speed", "warn", finding, remedy)
    elif same_mtu:
        known = "" if speeds[0] is None else f", {_speed_text(speeds[0])}"
        mtu = "" if machines[0].facts.mtu is None else f", MTU {machines[0].facts.mtu}"
        names = dict.fromkeys(machine.facts.interface for machine in machines if machine.facts.interface)
        yield MachineCheck("interface", "ok", f"{' and '.join(names) or 'the network'}{mtu}{known}")


def _at(machine: ExaminedMachine) -> str:
    return f" ({machine.facts.interface})" if machine.facts.interface else ""


def _speed_text(speed: int | None) -> str:
    if speed is None:
        return "unknown speed"
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"


def _judge_ports(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    closed = False
    for machine in machines:
        for other, outcome in machine.network.ports.items():
            if outcome == "open":
                continue
            closed = True
            why = outcome
            remedy = "open the ports of net.ipv4.ip_local_port_range between the machines, in both directions"
            if outcome == "no answer":
                why = f"no answer in {SECONDS_TO_CONNECT:g} s, so a firewall drops packets"
            elif outcome == "refused":
                why = "refused, so a firewall rejects it"
            else:
                remedy = "are both in one network? choose one that both are in (machines.interface)"
            finding = f"{machine.name} cannot connect to a port of {machines[int(other)].name}: {why}"
            yield MachineCheck("ports", "fail", finding, remedy)
    if not closed:
        yield MachineCheck("ports", "ok", "ports open both ways")


def _judge_all_reduce(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    errors = {machine.name: machine.network.error for machine in machines if machine.network.error}
    for error in dict.fromkeys(errors.values()):
        names = _names([name for name, text in errors.items() if text == error])
        remedy = "open all ports between all machines, or choose another network (machines.interface)"
        yield MachineCheck("all-reduce", "fail", f"{names}: {error}", remedy)
    latencies = [m.network.latency for m in machines if m.network.latency is not None]
    bandwidths = [m.network.bandwidth for m in machines if m.network.bandwidth is not None]
    if not latencies or not bandwidths:
        return
    latency, bandwidth = max(latencies), min(bandwidths)
    finding = (
        f"all-reduce {format_duration(latency)} for 1 B, {format_bytes_a_second(bandwidth)} for "
        f"{format_size(machines[0].network.reduced)} (gloo)"
    )
    if latency > _SLOW_SECONDS or bandwidth < _SLOW_BYTES:
        remedy = "training will wait for the network: name a faster one (machines.interface), or send less (plan)"
        yield MachineCheck("all-reduce", "warn", finding, remedy)
    else:
        yield MachineCheck("all-reduce", "ok", finding)


def format_bytes_a_second(rate: float) -> str:
    """Return a rate in words: 850 MB/s, 1.2 GB/s."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{format_rate(rate / 1e6)} MB/s"


def _judge_folder(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    folders = {machine.name: machine.folder for machine in machines if machine.folder is not None}
    if len(folders) < len(machines):
        return
    first, *others = folders
    problems = [*_folder_problems(folders)]
    yield from problems
    separate = [name for name in others if not folders[name].shared]
    wanted = next((config.folder for _, config in _configs(machines)), "auto")
    path = folders[first].out
    if separate and wanted == "shared":
        finding = f"machines.folder: shared, and {_names(separate)} does not see {folders[first].base} of {first}"
        remedy = "name a folder that all machines mount (out: ...), or say machines.folder: own"
        yield MachineCheck("run folder", "fail", finding, remedy)
    elif separate and len(separate) < len(others):
        finding = f"{path} of {first} is not seen by {_names(separate)}, which will write to a folder of its own"
        yield MachineCheck("run folder", "warn", finding, "mount it there as well, or say machines.folder: own")
    elif not problems:
        yield MachineCheck("run folder", "ok", "run folder of each machine's own" if separate else "one run folder")


def _folder_problems(folders: Mapping[str, FolderFacts]) -> Iterator[MachineCheck]:
    first = next(iter(folders))
    for name, folder in folders.items():
        if folder.lacks and not folder.shared:
            fault = f"{folder.lacks} is on {first}, and not on {name}"
            yield MachineCheck("run folder", "warn", fault, f"mount it there as well, or mkdir -p {folder.lacks}")
        if not folder.writable:
            fault = f"{name} cannot write to {folder.base}" + (f" ({folder.why_no_lock})" if folder.why_no_lock else "")
            yield MachineCheck(
                "run folder", "fail", fault, "name another folder (out: ..., or --out DIR), or change its owner"
            )
        if folder.free < _LEAST_FREE:
            fault = f"{name} has {format_size(folder.free)} free in {folder.base}"
            yield MachineCheck("run folder", "warn", fault, "free some space there, or name another folder (out: ...)")
        if folder.lock == "does not hold" or (folder.writable and folder.why_no_lock):
            why = f" ({folder.why_no_lock})" if folder.why_no_lock else ""
            fault = f"a lock of {first} in {folder.base} is not seen by {name}{why}"
            remedy = "mount it with locks (NFS: without nolock); until then two runs may write to one folder unnoticed"
            yield MachineCheck("locks", "warn", fault, remedy)


def _judge_limits(machines: Sequence[ExaminedMachine]) -> Iterator[MachineCheck]:
    checks = dict.fromkeys(check for machine in machines for check in machine.facts.limits)
    for check in checks:
        names = _names([machine.name for machine in machines if check in machine.facts.limits])
        yield MachineCheck(check.name, check.status, f"{names}: {check.finding}", check.remedy)
    if not checks:
        yield MachineCheck("limits", "ok", "limits and /dev/shm")
