"""Peaks of known devices, found by the name that torch reports: operations a second, memory and its bandwidth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from unipar.config import Precision

ArithmeticClass = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
"""Arithmetic of a matrix product, without sparsity; accumulated in fp32 where it is 16 bits wide."""

CLASS_OF_PRECISION: Final[Mapping[Precision, ArithmeticClass]] = {
    "fp64": "fp64",
    "fp32": "fp32",
    "bf16-mixed": "bf16",
    "bf16-master": "bf16",
    "fp16": "fp16",
    "fp8": "bf16",
    "fp8-rowwise": "bf16",
}
"""Arithmetic in which each precision multiplies matrices. fp32 is not tf32, which torch takes only when it is told;
fp8 counts as bf16, in which attention and the head multiply."""

_TERA, _GIGA, _MIB = 1e12, 1e9, 2**20


@dataclass(frozen=True)
class DevicePeaks:
    """Highest speeds and memory of a device, as its vendor gives them."""

    names: tuple[str, ...]
    """Names that torch reports."""

    classes: Mapping[ArithmeticClass, float]
    """Operations a second of dense matrix products; what the device computes only by emulation is absent."""

    memory: int
    """Bytes, as the driver reports them."""

    bandwidth: float
    """Bytes a second from and to its memory."""

    source: str
    """Document that says so."""

    @property
    def flops(self) -> Mapping[str, float]:
        """Operations a second by unipar's precision; a precision that is missing has no known peak."""
        return {
            precision: self.classes[wanted]
            for precision, wanted in CLASS_OF_PRECISION.items()
            if wanted in self.classes
        }


def find_device_peaks(name: str) -> DevicePeaks | None:
    """Return the peaks of the device that torch calls so; None for one that is not known, or for a part of one."""
    return _by_name().get(_normalised(name))


@cache
def _by_name() -> Mapping[str, DevicePeaks]:
    return {_normalised(name): device for device in DEVICES for name in device.names}


def _normalised(name: str) -> str:
    """Return a device's name without its vendor and brand, which older drivers leave out or write in other ways."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return " ".join(word for word in words if word not in ("nvidia", "amd", "tesla", "geforce", "instinct"))


def _device(
    names: str, teraflops: Mapping[ArithmeticClass, float], mebibytes: int, gigabytes_a_second: float, source: str
) -> DevicePeaks:
    return DevicePeaks(
        tuple(names.split(" | ")),
        {name: number * _TERA for name, number in teraflops.items()},
        mebibytes * _MIB,
        gigabytes_a_second * _GIGA,
        source,
    )


def _classes(fp64: float, fp32: float, tf32: float, half: float) -> Mapping[ArithmeticClass, float]:
    """Return teraflops by class; those of bf16 and fp16 are the same."""
    return {"fp64": fp64, "fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}


_HOPPER = _classes(66.9, 66.9, 494.7, 989.4)
_HOPPER_NVL = _classes(60.0, 60.0, 417.5, 835.5)
_AMPERE = _classes(19.5, 19.5, 156.0, 312.0)
_H100, _H200 = "NVIDIA H100 Tensor Core GPU Datasheet", "NVIDIA H200 Tensor Core GPU Datasheet"
_A100, _V100 = "NVIDIA A100 Tensor Core GPU Datasheet", "NVIDIA V100 Tensor Core GPU Datasheet"
_GEFORCE_AMPERE = "NVIDIA Ampere GA102 GPU Architecture, appendix A"
_GEFORCE_ADA = "NVIDIA Ada GPU Architecture, appendix A"

DEVICES: Final = (
    _device("NVIDIA GB200", _classes(40.0, 80.0, 1250.0, 2500.0), 189471, 8000.0, "NVIDIA GB200 NVL72 Datasheet"),
    _device(
        "NVIDIA B200", _classes(37.0, 75.0, 1100.0, 2250.0), 183359, 7700.0, "NVIDIA Blackwell Datasheet, HGX B200"
    ),
    _device("NVIDIA H200", _HOPPER, 143771, 4800.0, _H200),
    _device("NVIDIA H200 NVL", _HOPPER_NVL, 143771, 4800.0, _H200),
    _device("NVIDIA GH200 480GB", _HOPPER, 97871, 4000.0, "NVIDIA GH200 Grace Hopper Superchip Datasheet, 96 GB"),
    _device("NVIDIA H100 80GB HBM3 | NVIDIA H100 SXM5 80GB", _HOPPER, 81559, 3350.0, _H100),
    _device("NVIDIA H100 PCIe", _classes(51.2, 51.2, 378.0, 756.0), 81559, 2000.0, "NVIDIA H100 PCIe Product Brief"),
    _device("NVIDIA H100 NVL", _HOPPER_NVL, 95830, 3900.0, _H100),
    _device("NVIDIA H800", _classes(1.0, 66.9, 494.7, 989.4), 81559, 3350.0, "NVIDIA H800 Tensor Core GPU Datasheet"),
    _device("NVIDIA H20", _classes(1.0, 44.0, 74.0, 148.0), 97871, 4000.0, "NVIDIA H20 Datasheet"),
    _device("NVIDIA A100-SXM4-80GB | NVIDIA A100-SXM-80GB", _AMPERE, 81920, 2039.0, _A100),
    _device("NVIDIA A100 80GB PCIe", _AMPERE, 81920, 1935.0, _A100),
    _device("NVIDIA A100-SXM4-40GB", _AMPERE, 40960, 1555.0, _A100),
    _device("NVIDIA A100-PCIE-40GB", _AMPERE, 40960, 1555.0, _A100),
    _device("NVIDIA A800-SXM4-80GB", _AMPERE, 81920, 2039.0, "NVIDIA A800 Tensor Core GPU Datasheet"),
    _device("NVIDIA A30", _classes(10.3, 10.3, 82.0, 165.0), 24576, 933.0, "NVIDIA A30 Tensor Core GPU Datasheet"),
    _device("NVIDIA A40", _classes(0.58, 37.4, 74.8, 149.7), 46068, 696.0, "NVIDIA A40 Datasheet"),
    _device("NVIDIA A10", _classes(0.49, 31.2, 62.5, 125.0), 23028, 600.0, "NVIDIA A10 Tensor Core GPU Datasheet"),
    _device("NVIDIA A10G", _classes(0.55, 35.0, 35.0, 70.0), 23028, 600.0, "NVIDIA A10G Datasheet"),
    _device("NVIDIA L4", _classes(0.47, 30.3, 60.0, 121.0), 23034, 300.0, "NVIDIA L4 Tensor Core GPU Datasheet"),
    _device("NVIDIA L40", _classes(1.41, 90.5, 90.5, 181.05), 46068, 864.0, "NVIDIA L40 Datasheet"),
    _device("NVIDIA L40S", _classes(1.43, 91.6, 183.0, 362.05), 46068, 864.0, "NVIDIA L40S Datasheet"),
    _device("Tesla V100-SXM2-16GB", {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}, 16160, 900.0, _V100),
    _device(
        "Tesla V100-SXM2-32GB | Tesla V100-SXM3-32GB",
        {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0},
        32510,
        900.0,
        _V100,
    ),
    _device("Tesla V100-PCIE-16GB", {"fp64": 7.0, "fp32": 14.0, "fp16": 112.0}, 16160, 900.0, _V100),
    _device("Tesla V100-PCIE-32GB", {"fp64": 7.0, "fp32": 14.0, "fp16": 112.0}, 32510, 900.0, _V100),
    _device("Tesla V100S-PCIE-32GB", {"fp64": 8.2, "fp32": 16.4, "fp16": 130.0}, 32510, 1134.0, _V100),
    _device("Tesla T4", {"fp64": 0.25, "fp32": 8.1, "fp16": 65.0}, 15360, 320.0, "NVIDIA T4 Tensor Core GPU Datasheet"),
    _device(
        "NVIDIA GeForce RTX 5090",
        _classes(1.64, 104.8, 104.8, 209.5),
        32607,
        1792.0,
        "NVIDIA RTX Blackwell GPU Architecture, appendix A",
    ),
    _device("NVIDIA GeForce RTX 4090", _classes(1.29, 82.6, 82.6, 165.2), 24564, 1008.0, _GEFORCE_ADA),
    _device("NVIDIA GeForce RTX 4080", _classes(0.76, 48.7, 48.7, 97.5), 16376, 716.8, _GEFORCE_ADA),
    _device("NVIDIA GeForce RTX 3090", _classes(0.56, 35.6, 35.6, 71.0), 24576, 936.0, _GEFORCE_AMPERE),
    _device("NVIDIA GeForce RTX 3080", _classes(0.47, 29.8, 29.8, 59.5), 10240, 760.0, _GEFORCE_AMPERE),
    _device(
        "NVIDIA RTX 6000 Ada Generation",
        _classes(1.42, 91.1, 182.1, 364.2),
        49140,
        960.0,
        "NVIDIA RTX 6000 Ada Generation Datasheet",
    ),
    _device("NVIDIA RTX A6000", _classes(0.6, 38.7, 77.4, 154.8), 49140, 768.0, _GEFORCE_AMPERE),
    _device(
        "AMD Instinct MI325X", _classes(163.4, 163.4, 653.7, 1307.4), 262144, 6000.0, "AMD Instinct MI325X Data Sheet"
    ),
    _device(
        "AMD Instinct MI300X", _classes(163.4, 163.4, 653.7, 1307.4), 196592, 5300.0, "AMD Instinct MI300X Data Sheet"
    ),
    _device(
        "AMD Instinct MI250X | AMD Instinct MI250X/MI250",
        {"fp64": 47.9, "fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
        65520,
        1638.0,
        "AMD Instinct MI250X Data Sheet, half of it: torch sees each of its two dies as a device",
    ),
    _device(
        "AMD Instinct MI210",
        {"fp64": 45.3, "fp32": 45.3, "bf16": 181.0, "fp16": 181.0},
        65520,
        1638.0,
        "AMD Instinct MI210 Data Sheet",
    ),
)
"""Dense figures: those that a document gives with sparsity are halved."""
