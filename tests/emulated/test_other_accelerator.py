"""A second emulated accelerator, npu under PrivateUse1: unipar on a device that torch does not bring itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.softcuda.build import why_not_built
from tests.support.softcuda.findings import read_findings
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings import commands
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, losses_of_run
from unipar.memory.account import MemoryAccount

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedDevice]:
    """Processes with two emulated NPUs."""
    if reason := why_not_built("npu"):
        pytest.skip(reason)
    with EmulatedDevice(tmp_path_factory.mktemp("npu"), "ascend") as device:
        yield device


def write_config(folder: Path, **changes: Any) -> str:
    """Return the path of a config for two ranks on NPUs."""
    return commands.write_config(folder, **{"device": "npu", **changes})


@pytest.fixture(scope="module")
def losses_on_cpu(npu: EmulatedDevice, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process on the CPU."""
    folder = tmp_path_factory.mktemp("one")
    done = npu.unipar(["run", write_config(folder, device="cpu", parallel={"data": 1})])
    assert done.returncode == 0, done.stderr
    return losses_of_run(folder)


def test_torch_has_the_device(npu: EmulatedDevice) -> None:
    """An entry point loads the device; torch.accelerator, its module and its memory know it."""
    run = npu.run("""
import torch
from unipar.distributed.device import describe_build
x = torch.zeros(100, device="npu:1")
found = torch.accelerator.current_accelerator(check_available=True)
result = [str(found), torch.accelerator.device_count(), torch.cuda.is_available(), x.is_npu]
result += [torch.npu.get_device_name(1), torch.accelerator.memory_allocated(1), torch.npu.memory_allocated(0)]
result.append(describe_build())
""")
    assert run.result == ["npu", 2, False, True, "Ascend910B3", 512, 0, "Ascend NPU"]


def test_devices_are_kept_apart(npu: EmulatedDevice) -> None:
    """Tensors of the host and of another NPU are refused by name, and memory that nobody has written is no number."""
    run = npu.run("""
import torch
x, result = torch.empty(3, device="npu"), []
for other in ("cpu", "npu:1"):
    try:
        x + torch.zeros(3, device=other)
    except RuntimeError as e:
        result.append(str(e).partition(", but ")[2])
result.append(bool(x.isnan().all()))
""")
    found = "found at least two devices, npu:0 and npu:1! (aten::add.Tensor)"
    first = "got other is on cpu, different from other tensors on npu:0 (when checking argument in method wrapper_NPU_"
    assert run.result[0].startswith(first) or "npu:0 and cpu" in run.result[0], run.result
    assert run.result[1].startswith(found.partition("!")[0])
    assert run.result[2]


def test_out_of_memory(npu: EmulatedDevice, tmp_path: Path) -> None:
    """An NPU that is too small ends the run with the phase and the largest part of the memory."""
    done = npu.unipar(["run", write_config(tmp_path)], memory=600_000)
    assert done.returncode == 1
    assert "ran out of memory in the " in done.stderr, done.stderr
    assert "; the largest part was " in done.stderr


@pytest.mark.parametrize(
    ("shard", "precision", "near"),
    [
        ("nothing", "fp32", 1e-5),
        ("parameters", "fp32", 1e-5),
        ("nothing", "bf16-mixed", 0.03),
        ("nothing", "fp16", 0.01),
    ],
)
def test_two_ranks(
    shard: str, precision: str, near: float, npu: EmulatedDevice, losses_on_cpu: list[float], tmp_path: Path
) -> None:
    """DDP and FSDP2 train over HCCL to the losses of one process on the CPU, and no stream reads too early."""
    reports = tmp_path / "findings"
    reports.mkdir()
    train = {**COMMAND_SETTINGS["train"], "precision": precision}
    file = write_config(tmp_path, parallel={"data": 2, "shard": shard}, train=train)
    done = npu.unipar(["run", file], reports=reports)
    assert done.returncode == 0, done.stderr
    assert losses_of_run(tmp_path) == pytest.approx(losses_on_cpu, abs=near)
    findings = read_findings(reports)
    assert len({finding.pid for finding in findings}) == 2, "each rank has used its device"
    assert [finding for finding in findings if finding.kind in ("race", "hang")] == []


def test_parameters_offloaded_to_the_host(npu: EmulatedDevice, losses_on_cpu: list[float], tmp_path: Path) -> None:
    """FSDP2 keeps its shards in pinned host memory."""
    sharded = {"parallel": {"data": 2, "shard": "parameters"}, "model": {"offload": "parameters"}}
    done = npu.unipar(["run", write_config(tmp_path, **sharded)])
    assert done.returncode == 0, done.stderr
    assert losses_of_run(tmp_path) == pytest.approx(losses_on_cpu, abs=1e-5)


def test_verify(npu: EmulatedDevice, tmp_path: Path) -> None:
    """Both strategies agree with one process on the device, bit for bit with a replay."""
    strategies = "native/nothing,native/parameters"
    done = npu.unipar(["verify", write_config(tmp_path), "--strategies", strategies, "--steps", "2"])
    assert done.returncode == 0, done.stderr
    assert "all 2 strategies agree with one process over 2 steps on 2 ranks" in done.stdout
    assert done.stdout.count("agrees bit for bit") == 2


@pytest.mark.parametrize("first", ["npu", "cpu"])
def test_resumed_on_the_other_device(
    first: str, npu: EmulatedDevice, losses_on_cpu: list[float], tmp_path: Path
) -> None:
    """A checkpoint that was written on the device goes on on the CPU, and back, to the losses of one run."""
    begun = write_config(tmp_path, device=first, checkpoint={"every": 3})
    assert npu.unipar(["run", begun, "--set", "train.steps=3"]).returncode == 0
    other = "cpu" if first == "npu" else "npu"
    done = npu.unipar(["run", begun, "--resume", "--set", f"device={other}", "--set", "train.steps=6"])
    assert done.returncode == 0, done.stderr
    assert losses_of_run(tmp_path)[-3:] == pytest.approx(losses_on_cpu[3:], abs=1e-5)


def test_account_of_the_memory(npu: EmulatedDevice, tmp_path: Path) -> None:
    """Peaks of the allocator's history are the allocator's own, and all that trains has a name."""
    compared = {"strategies": ["native/nothing", "native/parameters"], "repeat": 1}
    train = {**COMMAND_SETTINGS["train"], "steps": 13}
    done = npu.unipar(["compare", write_config(tmp_path, compare=compared, train=train), "--details"])
    assert done.returncode == 0, done.stderr
    strategies = json.loads((tmp_path / "run/compare/compare.json").read_text("utf-8"))["strategies"]
    accounts = [
        MemoryAccount.model_validate_json(json.dumps(account))
        for strategy in strategies
        for account in strategy["memory"]
    ]
    assert [(a.device, a.on and a.on.name, a.on and a.on.used) for a in accounts] == [("npu", "Ascend910B3", None)] * 5
    driver = "memory of npu's driver and of its collectives was not measured: NVML is CUDA's"
    pinned = "pinned host memory was not recorded: torch.npu does not count it"
    assert [account.notes for account in accounts] == [(driver, pinned)] * 5, "no byte is beside the history"
    assert [account.host is not None for account in accounts] == [True] * 5
    for phase in (phase for account in accounts for phase in account.phases):
        assert sum(phase.held.values()) == phase.peak
        assert phase.unattributed < 0.01
    assert "torch's profiler does not show the collectives of npu" in " ".join(done.stdout.split())


def test_an_allocator_without_history(npu: EmulatedDevice) -> None:
    """A device's library need not record allocations: the account says so."""
    run = npu.run("""
import torch
from unipar.memory.sources.allocator_history import AllocatorHistory
del torch.npu.memory._record_memory_history
try:
    AllocatorHistory(torch.device("npu:0")).begin()
except Exception as e:
    result = str(e)
""")
    assert run.result == "the allocator of npu keeps no history"


def test_the_number_of_devices(npu: EmulatedDevice, tmp_path: Path) -> None:
    """`device: auto` takes the NPUs that ASCEND_RT_VISIBLE_DEVICES leaves; gloo cannot share one among ranks."""
    asked = write_config(tmp_path, device="auto", parallel={"data": "auto"})
    done = npu.unipar(["run", asked, "--set", "train.steps=1"])
    assert done.returncode == 0, done.stderr
    settled = json.loads((tmp_path / "run/launch.json").read_text("utf-8"))["settled"]
    assert (settled["device"], settled["sizes"]["ranks"]) == ("npu", 2)
    done = npu.unipar(["run", write_config(tmp_path / "four", parallel={"data": 4})])
    assert done.returncode == 3
    assert "parallel.data: 4 ranks on npu; 2 NPUs visible here; lower it, set device: cpu\n" in done.stderr
    done = npu.unipar(["run", write_config(tmp_path / "one", device="npu:0")])
    assert done.returncode == 3
    assert "2 ranks on npu:0, whose tensors gloo cannot move: ranks cannot share it" in done.stderr


def test_one_rank_on_one_of_the_devices(npu: EmulatedDevice, losses_on_cpu: list[float], tmp_path: Path) -> None:
    """`device: npu:1` is that one alone, and its collectives are HCCL's."""
    file = write_config(tmp_path, device="npu:1", parallel={"data": 1})
    done = npu.unipar(["run", file])
    assert done.returncode == 0, done.stderr
    assert losses_of_run(tmp_path) == pytest.approx(losses_on_cpu, abs=1e-5)


GROUP = """
import torch, torch.distributed as dist
from datetime import timedelta
from os import environ
rank = int(environ["RANK"])
torch.npu.set_device({device})
dist.init_process_group(timeout=timedelta(seconds=10), device_id=torch.device("npu", {device}))
x = torch.ones(4, device="npu") + rank
work = dist.all_reduce(x, async_op=True)
{wait}
result = [dist.get_backend(), (x + 0).tolist()]
"""


def test_collectives(npu: EmulatedDevice) -> None:
    """The backend that an NPU's tensors have is hccl."""
    runs = npu.ranks(GROUP.format(device="rank", wait="work.wait()"))
    assert [run.result for run in runs] == [["hccl", [3.0] * 4]] * 2, runs[0].stderr
    assert [run.texts("race") for run in runs] == [[], []]


def test_a_forgotten_wait(npu: EmulatedDevice) -> None:
    """A collective that nobody waits for is a race here, too."""
    runs = npu.ranks(GROUP.format(device="rank", wait=""))
    assert "of npu:0 reads memory that NCCL's ALLREDUCE on stream" in "".join(runs[0].texts("race"))


def test_two_ranks_on_one_device(npu: EmulatedDevice) -> None:
    """HCCL refuses them."""
    runs = npu.ranks(GROUP.format(device="0", wait="work.wait()"))
    assert "HCCL error: rank 0 and rank 1 both on NPU" in runs[0].error


@pytest.mark.parametrize(("backend", "library"), [("accelerate", "Accelerate"), ("deepspeed", "DeepSpeed")])
def test_a_library_that_asks_for_torch_npu(backend: str, library: str, npu: EmulatedDevice, tmp_path: Path) -> None:
    """Accelerate and DeepSpeed find an NPU by Ascend's package alone: a sentence says so."""
    done = npu.unipar(["run", write_config(tmp_path, backend=backend)])
    assert done.returncode == 3, done.stderr
    assert (
        f"{backend}/nothing: device: npu: {library} finds such a device by the package torch_npu, which is not "
        "installed; install it, set device: cpu, or choose backend: native"
    ) in done.stderr
