"""`Machine`: what a planned world runs on, from a preset or a file: speed of its devices, links and memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2, prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError

from unipar.config import Precision, Section
from unipar.config.config_file import read_yaml_file
from unipar.config.sections.strategy import EXPERT_AXIS, Axes
from unipar.config.validation_errors import join_mistakes, list_section_mistakes
from unipar.errors import ConfigError
from unipar.planning.machines.device_peaks import CLASS_OF_PRECISION, ArithmeticClass, find_device_peaks
from unipar.utils.text import closest, parse_bytes


def _bytes_in_words(value: Any) -> Any:
    return parse_bytes(value.removesuffix("/s")) if isinstance(value, str) else value


SizeOrRate = Annotated[float, BeforeValidator(_bytes_in_words), Field(gt=0)]
"""Bytes as a number, or in words: 80GiB, 450GB/s."""


class Link(Section):
    """Way from one rank to the next in a collective."""

    latency: Annotated[float, Field(ge=0)]
    """Seconds that a collective of two ranks takes for hardly any bytes."""

    bandwidth: SizeOrRate
    """Bytes a second in one direction that collectives reach."""

    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Share of the bandwidth that a collective reaches, by its name (`reduce_scatter`); all of it if it is absent."""


ReachedShare = Annotated[float, Field(gt=0, le=1)]

PeakRate = Annotated[float, Field(gt=0)] | None


class PeakRates(Section):
    """Operations a second of a device in dense matrix products; one that is absent is not known."""

    fp64: PeakRate = None
    fp32: PeakRate = None
    tf32: PeakRate = None
    bf16: PeakRate = None
    fp16: PeakRate = None


class Machine(Section):
    """Machine of a planned world; a world of more ranks has several that are alike."""

    name: str = "machine"
    device: Literal["cpu", "cuda"] = "cuda"
    flops: PeakRates
    """Peak of one device."""

    reached: ReachedShare | Annotated[dict[ArithmeticClass, ReachedShare], Field(min_length=1)] = 0.5
    """Share of the peak that forward and backward reach: one, or one for each arithmetic (`{fp32: 0.9, bf16: 0.4}`)."""

    operation: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that an operation takes beside its arithmetic; on the CPU they add up, a GPU computes meanwhile."""

    bandwidth: SizeOrRate
    """Bytes a second from and to a device's memory."""

    memory: SizeOrRate
    """Memory of a rank."""

    host: SizeOrRate | None = None
    """Memory of the host, for all ranks of a machine."""

    ranks: Annotated[int, Field(ge=1)]
    """Ranks of a machine."""

    within: Link
    """Between ranks of a machine."""

    across: Link | None = None
    """Between machines: bandwidth of all adapters of a machine together; absent: there is one machine alone."""

    hides: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of a collective's time for which computing goes on beside it, where the library lets it."""

    source: str = ""
    """Source of the numbers."""

    def peak(self, precision: Precision) -> float | None:
        """Return the operations a second in a precision; None if no peak is known."""
        return getattr(self.flops, CLASS_OF_PRECISION[precision])

    def reached_in(self, precision: Precision) -> float:
        """Return the share of the peak that forward and backward reach; the lowest where a precision's is not given."""
        if not isinstance(self.reached, dict):
            return self.reached
        return self.reached.get(CLASS_OF_PRECISION[precision], min(self.reached.values()))

    def way(self, axes: Axes, axis: str, ranks: int, world: int, stride: int = 1) -> Link:
        """Return the slowest link in a group of this many ranks along an axis of a world, `stride` from one another.

        A group's share of the way between machines is that of its ranks among all ranks of a machine.
        """
        distance = _distance(axes, axis, world) * stride
        together = min(ranks, max(1, self.ranks // distance))
        if together >= ranks or world <= self.ranks:
            return self.within
        if self.across is None:
            raise ConfigError(
                f"the machine {self.name} has {self.ranks} ranks and nothing that connects several of them: give "
                f"`across: {{latency: ..., bandwidth: ...}}` to plan for {world} ranks, or plan for fewer"
            )
        bandwidth = self.across.bandwidth * together / self.ranks
        if together > 1:
            bandwidth = min(bandwidth, self.within.bandwidth)
        return self.across.model_copy(update={"bandwidth": bandwidth})


def _distance(axes: Axes, axis: str, world: int) -> int:
    """Return how far apart in the order of ranks two neighbours along an axis are; tensor's are beside each other."""
    sizes = {"tensor": axes.tensor, "context": axes.context, "data": world // axes.ranks, "pipeline": axes.pipeline}
    names = list(sizes)
    along = axis.replace(EXPERT_AXIS, "data").split(" x ")  # its ranks are neighbours along the data
    first = min((names.index(name) for name in along if name in names), default=0)
    return prod(list(sizes.values())[:first])


def hops(ranks: int) -> int:
    """Return how many messages after one another a collective of small tensors takes, along a tree."""
    return ceil(log2(ranks)) if ranks > 1 else 0


def load_machine(text: str) -> Machine:
    """Return the machine of a preset's name or of a file; raise ConfigError that names what is like it."""
    if text in PRESETS:
        return PRESETS[text]
    file = Path(text)
    if file.suffix not in (".yaml", ".yml") and not file.is_file():
        near = closest(text.lower(), PRESETS) or closest(text.lower(), [name.partition("-")[0] for name in PRESETS])
        near = next((name for name in PRESETS if near and name.startswith(near)), None)
        way = f"did you mean {near}?" if near else "a file's name ends in .yaml."
        raise ConfigError(
            f"--machine {text}: there is no such preset; {way} Presets: {', '.join(PRESETS)}. `unipar plan "
            "--calibrate` measures this machine"
        )
    return _read_machine(file)


def _read_machine(file: Path) -> Machine:
    data, places = read_yaml_file(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file}, line 1: a machine consists of keys and values, such as `ranks: 8`")
    preset = data.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"{file}: preset: {preset!r} is not one of {', '.join(PRESETS)}")
    start = PRESETS[preset].model_dump() if preset is not None else {}
    lines = {key: f"line {number}" for key, number in places.items()}
    try:
        return Machine.model_validate({**start, "name": file.stem, **data})
    except ValidationError as e:
        raise ConfigError(f"{file}: {join_mistakes(list_section_mistakes(e, Machine, lines))}") from None


LINK_REACHED: Final = 0.8
"""Share of a link's bandwidth that collectives of large tensors reach, assumed for the presets."""

_LINKS: Final[Mapping[str, tuple[float, float]]] = {
    "NVLink 5": (8e-6, 900e9),
    "NVLink 4": (8e-6, 450e9),
    "NVLink 3": (8e-6, 300e9),
    "NVLink 2": (10e-6, 150e9),
    "Infinity Fabric, MI300X": (12e-6, 448e9),
    "Infinity Fabric, MI250X": (12e-6, 100e9),
    "PCIe 5": (15e-6, 64e9),
    "PCIe 4": (15e-6, 32e9),
    "PCIe 3": (15e-6, 16e9),
    "InfiniBand NDR": (20e-6, 50e9),
    "InfiniBand HDR": (20e-6, 25e9),
    "InfiniBand EDR": (20e-6, 12.5e9),
    "Ethernet 100G": (40e-6, 12.5e9),
    "Ethernet 10G": (50e-6, 1.25e9),
}
"""Latency as assumed, and bandwidth of a device or adapter in one direction, as standards and data sheets give it."""


def known_link(name: str, number: int = 1) -> Link:
    """Return this many links of a kind side by side, with what collectives reach of them."""
    latency, bandwidth = _LINKS[name]
    return Link(latency=latency, bandwidth=bandwidth * number * LINK_REACHED)


_MEASURED_SHARES: Final = {"A100": 0.52, "H100": 0.43}
"""Published shares of the peak: GPT-3 on A100 (Narayanan and others, 2021), Llama 3 on H100 (Meta, 2024)."""

_LAUNCH = 5e-6
"""Seconds between two kernels that a process starts, assumed."""


def _preset(
    name: str,
    device: str,
    ranks: int,
    within: str,
    across: str,
    adapters: int,
    *,
    host: float,
    reached: float = _MEASURED_SHARES["H100"],
) -> Machine:
    peaks = find_device_peaks(device)
    assert peaks is not None, device
    return Machine(
        name=name,
        flops=PeakRates(**peaks.classes),
        reached=reached,
        operation=_LAUNCH,
        bandwidth=peaks.bandwidth,
        memory=peaks.memory,
        host=host * 2**40,
        ranks=ranks,
        within=known_link(within),
        across=known_link(across, adapters),
        source=f"{peaks.source}; {within}, {adapters} x {across}",
    )


_A100 = _MEASURED_SHARES["A100"]
_ETHERNET = "Ethernet 100G"

PRESETS: Final[Mapping[str, Machine]] = {
    machine.name: machine
    for machine in (
        _preset("b200-sxm", "NVIDIA B200", 8, "NVLink 5", "InfiniBand NDR", 8, host=2),
        _preset("h200-sxm", "NVIDIA H200", 8, "NVLink 4", "InfiniBand NDR", 8, host=2),
        _preset("h100-sxm", "NVIDIA H100 80GB HBM3", 8, "NVLink 4", "InfiniBand NDR", 8, host=2),
        _preset("h100-pcie", "NVIDIA H100 PCIe", 8, "PCIe 5", "InfiniBand NDR", 2, host=1),
        _preset("a100-80g-sxm", "NVIDIA A100-SXM4-80GB", 8, "NVLink 3", "InfiniBand HDR", 8, host=2, reached=_A100),
        _preset("a100-80g-pcie", "NVIDIA A100 80GB PCIe", 8, "PCIe 4", "InfiniBand HDR", 2, host=1, reached=_A100),
        _preset("a100-40g-sxm", "NVIDIA A100-SXM4-40GB", 8, "NVLink 3", "InfiniBand HDR", 8, host=1, reached=_A100),
        _preset("a100-40g-pcie", "NVIDIA A100-PCIE-40GB", 8, "PCIe 4", "InfiniBand HDR", 2, host=1, reached=_A100),
        _preset("v100-32g-sxm", "Tesla V100-SXM2-32GB", 8, "NVLink 2", "InfiniBand EDR", 4, host=0.5),
        _preset("v100-16g-sxm", "Tesla V100-SXM2-16GB", 8, "NVLink 2", "InfiniBand EDR", 4, host=0.5),
        _preset("l40s", "NVIDIA L40S", 8, "PCIe 4", _ETHERNET, 2, host=1),
        _preset("l4", "NVIDIA L4", 8, "PCIe 4", _ETHERNET, 1, host=0.375),
        _preset("a10", "NVIDIA A10", 4, "PCIe 4", _ETHERNET, 1, host=0.375),
        _preset("t4", "Tesla T4", 4, "PCIe 3", "Ethernet 10G", 1, host=0.1875),
        _preset("rtx-4090", "NVIDIA GeForce RTX 4090", 8, "PCIe 4", "Ethernet 10G", 1, host=0.5),
        _preset("rtx-3090", "NVIDIA GeForce RTX 3090", 4, "PCIe 4", "Ethernet 10G", 1, host=0.25),
        _preset("mi300x", "AMD Instinct MI300X", 8, "Infinity Fabric, MI300X", "InfiniBand NDR", 8, host=2),
        _preset("mi250x", "AMD Instinct MI250X", 8, "Infinity Fabric, MI250X", "InfiniBand HDR", 4, host=0.5),
    )
}
"""Machines by name."""
