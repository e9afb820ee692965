"""Peaks of devices, by the names that torch reports."""

from __future__ import annotations

import pytest

from unipar.planning.machines.device_peaks import DEVICES, find_device_peaks


@pytest.mark.parametrize(
    ("name", "precision", "teraflops", "gibibytes", "terabytes_a_second"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4, 79.6, 3.35),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9, 79.6, 3.35),
        ("NVIDIA H200", "bf16-master", 989.4, 140.4, 4.8),
        ("A100-SXM4-80GB", "fp16", 312.0, 80.0, 2.039),
        ("NVIDIA A100-PCIE-40GB", "fp64", 19.5, 40.0, 1.555),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0, 15.8, 0.9),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2, 24.0, 1.008),
        ("AMD Instinct MI300X", "bf16-mixed", 1307.4, 192.0, 5.3),
    ],
)
def test_peaks_by_name(
    name: str, precision: str, teraflops: float, gibibytes: float, terabytes_a_second: float
) -> None:
    """Found with and without the vendor's name, as drivers report it."""
    found = find_device_peaks(name)
    assert found is not None
    assert found.flops[precision] == pytest.approx(teraflops * 1e12)
    assert round(found.memory / 2**30, 1) == gibibytes
    assert found.bandwidth == pytest.approx(terabytes_a_second * 1e12)
    assert "ata" in found.source or "Architecture" in found.source


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3080 Ti"],
)
def test_unknown_devices(name: str) -> None:
    """A part of a device, or one whose name only begins alike, has other peaks."""
    assert find_device_peaks(name) is None


def test_what_a_device_lacks_has_no_peak() -> None:
    """V100 has no bf16; no name stands for two devices, and classes are in the order of their speed."""
    found = find_device_peaks("Tesla V100-SXM2-32GB")
    assert found is not None
    assert sorted(found.flops) == ["fp16", "fp32", "fp64"]
    names = [name for device in DEVICES for name in device.names]
    assert len(names) == len(set(names))
    for device in DEVICES:
        assert device.classes["fp64"] <= device.classes["fp32"] <= device.classes["fp16"], device.names
