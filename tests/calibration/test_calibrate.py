"""Calibration of this machine: measured once with small sizes, fitted from literal points, written as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from unipar.calibration.calibrate import calibrate, fit_link, machine_from, write_machine_file
from unipar.calibration.measurements import CalibrationSizes, RankMeasurements
from unipar.errors import OutExists, UniparError
from unipar.planning.machines.machine import load_machine

SMALL = CalibrationSizes((32,), (16, 32), 1 << 16, (1 << 8, 1 << 14), repeats=2)
MEASURED: dict[str, Any] = {
    "flops": {"fp32": 8e10, "bf16": 2e11, "fp64": 4e10},
    "block": {"fp32": 4e10, "bf16": 5e10, "fp64": 4.1e10},
    "bandwidth": 1.23456e10,
    "operation": 5e-6,
    "memory": 8 * 2**30,
    "what": "2 cores, 1 for each of 2 ranks",
    "collectives": {
        "all_reduce": [(4096, 0.001), (10**8, 0.101)],
        "all_gather": [(4096, 0.002), (10**8, 0.202)],
        "reduce_scatter": [(4096, 0.004), (10**8, 0.404)],
    },
    "hides": -0.2,
}


def test_this_machine(tmp_path: Path) -> None:
    """Two ranks measure it; what they find is told as they go, and the file is a machine."""
    told: list[str] = []
    found = calibrate(told.append, sizes=SMALL, name="here")
    write_machine_file(found, tmp_path / "here.yaml")
    assert load_machine(str(tmp_path / "here.yaml")) == found
    assert (found.name, found.ranks, found.device) == ("here", 2, "cpu")
    assert set(found.within.shares) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert found.flops.fp32 is not None
    assert [text.partition(":")[0] for text in told[1:6]] == ["fp32", "bf16", "fp64", "memory", "a small operation"]
    assert told[0].endswith("cores with 2 ranks; Ctrl-C stops, and writes nothing")
    with pytest.raises(OutExists) as caught:
        write_machine_file(found, tmp_path / "here.yaml")
    assert str(caught.value) == (
        f"--calibrate -o {tmp_path}/here.yaml: it already exists; name another file, or replace it (--overwrite)"
    )


def test_what_measurements_mean() -> None:
    """Latency is the median of the smallest messages, bandwidth that of the fastest collective; others get a share."""
    found = machine_from(MEASURED, device="cpu", ranks=2, name="box")
    assert found.reached == {"fp32": 0.5, "bf16": 0.25, "fp64": 1.0}
    assert (found.bandwidth, found.hides) == (1.23e10, 0.0)
    assert (found.within.latency, found.within.bandwidth) == (0.002, 1e9)
    assert found.within.shares == {"all_reduce": 1.0, "all_gather": 0.25, "reduce_scatter": 0.125}


def test_a_collective_as_latency_and_bandwidth() -> None:
    """A ring of two sends all bytes of a sum, and half of those of a gathering."""
    assert fit_link([(4096, 0.001), (10**8, 0.101)], "all_reduce") == (0.001, pytest.approx(1e9))
    assert fit_link([(4096, 0.001), (10**8, 0.101)], "all_gather") == (0.001, pytest.approx(5e8))


def test_a_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is told, and nothing is left running."""

    def fails(self: object, size: int, dtype: object) -> float:
        raise RuntimeError("no such product")

    monkeypatch.setattr(RankMeasurements, "_matrix_rate", fails)
    with pytest.raises(UniparError) as caught:
        calibrate(sizes=SMALL)
    assert str(caught.value) == "--calibrate: RuntimeError: no such product; nothing is written"


def test_rank_1_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the rank that fails is told, not that of rank 0, which loses the connection to it."""
    measured = RankMeasurements.run

    def fails_on_rank_1(self: RankMeasurements) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory left")
        return measured(self)

    monkeypatch.setattr(RankMeasurements, "run", fails_on_rank_1)
    with pytest.raises(UniparError) as caught:
        calibrate(sizes=SMALL)
    assert str(caught.value) == "--calibrate: RuntimeError: no memory left; nothing is written"
