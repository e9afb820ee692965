"""What is measured of a device and said of it: `doctor`, a calibration, and what accounts of memory cannot know."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.softcuda.emulation import emulated_environment
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, write_config
from unipar.results.run_traces import read_traces

pytestmark = pytest.mark.emulated


def test_doctor_names_the_devices(emulated: EmulatedDevice) -> None:
    """Torch's build and each device."""
    done = emulated.unipar(["doctor", "--json"], "h100")
    found = {check["name"]: check["finding"] for check in json.loads(done.stdout)["checks"]}
    assert found["torch"].endswith(", built for CUDA 13.0")
    assert found["GPUs"] == "2: NVIDIA H100 80GB HBM3"


def test_explain_names_the_dtypes_of_fp16(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Weights stay in fp32, and gradients are those of a scaled loss."""
    config = write_config(tmp_path, train={**COMMAND_SETTINGS["train"], "precision": "fp16"})
    done = emulated.unipar(["explain", config])
    assert done.returncode == 0, done.stderr
    assert "fp32, of a scaled loss" in " ".join(done.stdout.split())


def test_explain_names_the_attention_of_a_device(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """With context, `auto` may be torch's ring there, which the CPU has not."""
    config = write_config(tmp_path, parallel={"data": 1, "context": 2})
    done = emulated.unipar(["explain", config, "--deep"])
    assert done.returncode == 0, done.stderr
    assert "auto is torch's ring where it can do it, else" in " ".join(done.stdout.split())


def test_the_draft_of_a_script_in_fp16(emulated: EmulatedDevice) -> None:
    """Its loss was scaled on a device: the draft has fp16, which unipar has there."""
    run = emulated.run("""
from unipar.observing.draft_config import guess_precision
from unipar.results.observed_rank import ObservedRank
from unipar.results.observed_recipe import Recipe
result = [
    guess_precision(ObservedRank(rank=0, size=1, dtypes={"float32": 9}, device=device), Recipe(loss_scaling=True))
    for device in ("cuda", "cpu")
]
""")
    assert run.result == [["fp16", ""], ["fp32", "to do: fp16 is for CUDA, not for cpu"]], run.stderr


def test_calibration(emulated: EmulatedDevice) -> None:
    """Two ranks measure two devices over NCCL, and the machine has the memory and the name of one."""
    run = emulated.run("""
from unipar.calibration.calibrate import calibrate
from unipar.calibration.measurements import CalibrationSizes
found = calibrate(sizes=CalibrationSizes((32,), (16, 32), 1 << 16, (1 << 8, 1 << 14), repeats=2))
result = [found.device, found.ranks, found.memory, sorted(found.within.shares), found.source]
""")
    assert run.result is not None, run.stderr
    assert run.result[:4] == ["cuda", 2, 80 * 2**30, ["all_gather", "all_reduce", "reduce_scatter"]]
    assert run.result[4].endswith(", NVIDIA A100-SXM4-80GB")


def test_accounts_where_nvml_is_silent(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Memory beside the allocator is not known, and its reason is a note."""
    del emulated  # it is built, or the test is skipped
    compared = {"strategies": ["native/nothing"], "repeat": 1}
    config = write_config(tmp_path, compare=compared, train={**COMMAND_SETTINGS["train"], "steps": 13})
    words = [sys.executable, "-m", "unipar", "compare", config]  # in forks torch's count would start CUDA
    environment = {**os.environ, **emulated_environment("no-nvml")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    strategies = json.loads((tmp_path / "run/compare/compare.json").read_text("utf-8"))["strategies"]
    said = "memory of CUDA and NCCL was not measured: NVML failed: NVML Shared Library Not Found"
    assert [(account["on"]["used"], account["notes"]) for strategy in strategies for account in strategy["memory"]] == (
        [(None, [said])] * 3
    )


def test_nvml_in_a_container(emulated: EmulatedDevice) -> None:
    """It lists the processes outside, among which this one has another id."""
    run = emulated.run(
        """
import os, torch
from unipar.memory.sources.nvml import query_bytes_used
x = torch.zeros(100, device="cuda")
found, why = query_bytes_used(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
result = [found, why.replace(str(os.getpid()), "N")]
""",
        "container",
    )
    assert run.result == [None, "NVML does not list process N: in a container it shows other process ids"], run.stderr


def test_an_allocator_that_keeps_no_history(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """cudaMallocAsync: a comparison says that memory was not recorded, and by which variable."""
    config = write_config(tmp_path, compare={"strategies": ["native/nothing"], "repeat": 1})
    variables = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = emulated.unipar(["compare", config, "--details"], variables=variables)
    assert done.returncode == 0, done.stderr
    assert (
        "memory was not recorded: PYTORCH_ALLOC_CONF says backend:cudaMallocAsync, which keeps no history; leave it out"
    ) in " ".join(done.stdout.split())


def test_accounts_without_a_meter(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Where the meter of the host's memory cannot be stored, the device's account stands alone, and says so."""
    compared = {"strategies": ["native/nothing"], "repeat": 1}
    config = write_config(tmp_path, compare=compared, train={**COMMAND_SETTINGS["train"], "steps": 13})
    done = emulated.unipar(["compare", config, "--details"], variables={"XDG_CACHE_HOME": "/proc/nowhere"})
    assert done.returncode == 0, done.stderr
    assert "the host's memory was not recorded: it cannot be stored in the user's cache" in " ".join(
        done.stdout.split()
    )
    strategies = json.loads((tmp_path / "run/compare/compare.json").read_text("utf-8"))["strategies"]
    assert [(account["device"], account["host"]) for strategy in strategies for account in strategy["memory"]] == [
        ("cuda", None)
    ] * 3


def test_a_microbatch_where_nvml_is_silent(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """`micro: auto` asks for the memory that the driver does not tell."""
    config = write_config(tmp_path, batch={"total": 8, "micro": "auto"}, train=COMMAND_SETTINGS["train"])
    done = emulated.unipar(["run", config], "no-nvml")
    assert done.returncode == 2, done.stderr
    assert (
        "NVML does not say how much memory a GPU has: NVML does not start: NVML Shared Library Not Found" in done.stderr
    )
    assert "say it in batch.memory, such as 80GiB" in done.stderr


def test_a_history_that_is_too_long(emulated: EmulatedDevice) -> None:
    """Torch keeps the last entries: the account says how many, and that memory of another device is not in it."""
    run = emulated.run("""
import torch
from unipar.memory.sources import allocator_history
allocator_history.MAX_HISTORY_ENTRIES = 4
device = torch.device("cuda:0")
torch.cuda.set_device(device)
before = torch.empty(1000, device=device)
other = torch.empty(100, device="cuda:1")
history = allocator_history.AllocatorHistory(device)
history.begin()
history.mark("forward")
kept = [torch.empty(1000, device=device) for _ in range(3)]
del kept
del before
history.mark("backward")
history.end()
seen = history.collect_events()
result = [seen.events["size"].tolist(), *history.notes]
""")
    assert run.result is not None, run.stderr
    assert run.result == [
        [-4096] * 2,
        "torch kept only the last 2 of 7 events of its history",
        "memory on other devices (1) is not counted",
        "the history and the allocator's own count differ by up to 4096 bytes",
    ]


def test_steps_log_their_memory(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """`log.memory` shows the allocator's counters by phase."""
    config = write_config(tmp_path, log={"every": 1, "memory": True})
    done = emulated.unipar(["run", config])
    assert done.returncode == 0, done.stderr
    assert "the counters of torch's allocator are shown" in done.stdout + done.stderr


def test_steps_are_traced(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The device has no kernels: the entries are operators on the CPU; collectives and categories have their names."""
    config = write_config(tmp_path, log={"every": 1, "memory": True, "trace": {"steps": [3, 4]}})
    done = emulated.unipar(["run", config])
    assert done.returncode == 0, done.stderr
    (trace,) = read_traces(tmp_path / "run")
    assert (trace.first, trace.last, trace.counted_on, len(trace.entries)) == (3, 4, "CPU", 10)
    with gzip.open(trace.file) as file:
        events = json.load(file)["traceEvents"]
    assert not [event for event in events if event.get("cat") == "kernel"]
    sent = {e["args"]["axis"]: e["name"].partition(" ")[0] for e in events if "axis" in e.get("args", {})}
    assert sent == {"data": "all_reduce"}
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert {"parameters", "optimizer", "unattributed"} <= set(counters[0])
    assert counters[0]["parameters"] > 0
