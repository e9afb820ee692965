"""Calibration: what this machine reaches, measured by two forked ranks, as a machine's file for `unipar plan`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from unipar.calibration.measurements import (
    CPU_SIZES,
    CUDA_SIZES,
    CalibrationSizes,
    measure_as_rank,
)
from unipar.distributed.accelerators import count_visible_gpus
from unipar.errors import OutExists, UniparError
from unipar.utils.files import whole

if TYPE_CHECKING:
    from unipar.planning.machines.machine import Machine

RANKS: Final = 2
"""Ranks that measure together, as they would train: they share the machine's cores and memory."""

CALIBRATION_PATIENCE: Final = 300.0
"""Seconds after which a calibration has hung."""


def calibrate(
    tell: Callable[[str], None] = lambda text: None, *, sizes: CalibrationSizes | None = None, name: str = "machine"
) -> Machine:
    """Return this machine as it was measured; `tell` is given each thing that was measured, as a sentence."""
    gpus = count_visible_gpus()
    device = "cuda" if gpus else "cpu"
    ranks = min(RANKS, gpus) if gpus else RANKS
    wanted = sizes or (CUDA_SIZES if gpus else CPU_SIZES)
    tell(f"measuring {count_devices(gpus)} with {ranks} rank{'s' * (ranks > 1)}; Ctrl-C stops, and writes nothing")
    measured = _measure(device, ranks, wanted, tell)
    return machine_from(measured, device=device, ranks=gpus or RANKS, name=name)


def count_devices(gpus: int) -> str:
    """Return what is measured, in words."""
    return f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else f"{os.cpu_count()} cores"


def machine_from(measured: Mapping[str, Any], *, device: str, ranks: int, name: str) -> Machine:
    """Return the machine that measurements describe."""
    from unipar.planning.machines.machine import Machine

    peaks: Mapping[str, float] = measured["flops"]
    blocks: Mapping[str, float] = measured["block"]
    rates: Mapping[str, Sequence[Sequence[float]]] = measured.get("collectives", {})
    fitted = {kind: fit_link(points, kind) for kind, points in rates.items()}
    within = {"latency": 0.0, "bandwidth": 1e9}
    if fitted:
        best = max(bandwidth for _, bandwidth in fitted.values())
        within = {
            "latency": _rounded(median(latency for latency, _ in fitted.values())),
            "bandwidth": _rounded(best),
            "shares": {kind: round(bandwidth / best, 3) for kind, (_, bandwidth) in fitted.items()},
        }
    links = "" if fitted else "; one device alone: the link within is a guess"
    values = {
        "name": name,
        "device": device,
        "flops": {kind: _rounded(value) for kind, value in peaks.items()},
        "reached": {kind: max(0.01, min(1.0, round(blocks[kind] / peak, 3))) for kind, peak in peaks.items()},
        "operation": _rounded(measured["operation"]),
        "bandwidth": _rounded(measured["bandwidth"]),
        "memory": int(measured["memory"]),
        "ranks": ranks,
        "within": within,
        "hides": round(max(0.0, min(1.0, measured.get("hides", 0.0))), 2),
        "source": f"measured on {platform.node()}, {measured['what']}{links}",
    }
    return Machine.model_validate(values)


def fit_link(points: Sequence[Sequence[float]], collective: str) -> tuple[float, float]:
    """Return latency and bandwidth of a collective of two ranks, from bytes and seconds: smallest and largest first."""
    from unipar.planning.speed import bytes_on_the_way

    (_, latency), (size, seconds) = points[0], points[-1]
    return latency, size * bytes_on_the_way(collective, RANKS) / max(seconds - latency, seconds / 10)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def check_machine_file(out: Path, *, overwrite: bool) -> None:
    """Raise OutExists if the file is there, and is not to be replaced."""
    if out.is_symlink() or out.is_dir() or (out.exists() and not overwrite):
        raise OutExists(f"--calibrate -o {out}: it already exists; name another file, or replace it (--overwrite)")


def write_machine_file(machine: Machine, out: Path, *, overwrite: bool = False) -> None:
    """Write a machine as YAML, as a whole or not at all."""
    from unipar.config.yaml_edit import yaml_value

    check_machine_file(out, overwrite=overwrite)
    values = machine.model_dump(exclude_none=True, exclude={"name"})
    comment = "# Measured by `unipar plan --calibrate`; for `unipar plan FILE --machine`"
    lines = [comment, *(f"{key}: {yaml_value(value)}" for key, value in values.items() if value != {}), ""]
    with whole(out) as partial:
        partial.write_text("\n".join(lines), encoding="utf-8")
        partial.chmod(0o644)


def _measure(device: str, ranks: int, sizes: CalibrationSizes, tell: Callable[[str], None]) -> Mapping[str, Any]:
    """Return what rank 0 of a world has measured; its processes are gone when this returns or raises."""
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory(prefix="unipar-calibrate-") as folder, contextlib.ExitStack() as stack:
        if device == "cpu":
            import_module("torch")  # forks share the import
        receiver, sender = context.Pipe(duplex=False)
        stack.callback(receiver.close)
        workers: list[Any] = []
        stack.callback(_end, workers)
        for rank in range(ranks):
            worker = context.Process(
                target=measure_as_rank, args=(rank, ranks, device, folder, sizes, sender), daemon=True
            )
            worker.start()
            workers.append(worker)
        sender.close()
        return _collect(receiver, workers, tell)


def _collect(receiver: Any, workers: Sequence[Any], tell: Callable[[str], None]) -> Mapping[str, Any]:
    deadline = time.monotonic() + CALIBRATION_PATIENCE
    while time.monotonic() < deadline:
        if not receiver.poll(0.2):
            if dead := [w for w in workers if w.exitcode not in (None, 0)]:
                raise UniparError(
                    f"--calibrate: a rank ended with exit code {dead[0].exitcode}, and nothing is written; run it "
                    "again with --debug"
                )
            continue
        try:
            kind, value = receiver.recv()
        except EOFError:
            break
        if kind == "result":
            return json.loads(value)
        if kind == "error":
            raise UniparError(f"--calibrate: {value}; nothing is written")
        tell(value)
    raise UniparError(
        f"--calibrate: the ranks did not answer within {CALIBRATION_PATIENCE:.0f} s, and nothing is written; run it "
        "again when no other program uses the machine"
    )


def _end(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.join(1.0)
        if worker.is_alive():
            worker.kill()
        worker.join()
