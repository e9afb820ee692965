"""Accounts of memory as CUDA would give them."""

from __future__ import annotations

from unipar.memory.account import DeviceMemory, MemoryAccount, PhasePeak

MIB = 2**20


GPU = "NVIDIA A100-SXM4-80GB"


def account(used: int | None = 1900 * MIB, host: MemoryAccount | None = None) -> MemoryAccount:
    """A rank that allocates 1000 MiB beyond a base of 100, of 1400 MiB that the allocator has."""
    peak = PhasePeak(
        name="backward",
        peak=1000 * MIB,
        held={"parameters": 600 * MIB, "activations": 400 * MIB},
        reserved=1400 * MIB,
        active=1150 * MIB,
        requested=1090 * MIB,
    )
    return MemoryAccount(
        rank=0,
        method="torch's allocator of the device, by its own history and statistics",
        device="cuda",
        base=100 * MIB,
        phases=(peak,),
        peaks=(peak.peak,),
        on=DeviceMemory(name=GPU, reserved=1400 * MIB, used=used),
        pinned=(PhasePeak(name="update", peak=64 * MIB, held={"optimizer": 64 * MIB}),) if host is not None else (),
        host=host,
    )
