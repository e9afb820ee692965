"""Counting GPUs without torch, and how many ranks `auto` means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from unipar.backend import resources
from unipar.backend.resources import RankCount
from unipar.config import Config
from unipar.config.config_source import load_given_config
from unipar.distributed import accelerators
from unipar.distributed import gpus as distributed_gpus
from unipar.distributed.accelerators import (
    VisibleDevices,
    ask_torch,
    count_chosen_gpus,
    count_visible_gpus,
    find_visible_devices,
    torch_has_cuda,
)
from unipar.distributed.gpus import DriverSilent, list_gpu_ids, smallest_gpu_memory
from unipar.distributed.place import Place
from unipar.errors import Unsupported, WorldMismatch
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import PreparedRun

IDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4"]


def config(**changes: Any) -> Config:
    return load_given_config({"batch": {"total": 32}, "train": {"steps": 1}}, changes).config


def place(size: int, local: int | None = None) -> Place:
    return Place(rank=0, size=size, local_rank=0, local_size=local or size, launcher="torchrun")


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 3 ", 2),
        ("0,9,1", 1),
        ("0,-1,1", 1),
        ("1,1", 0),
        ("GPU-cccc", 1),
        ("GPU-cccc-3,GPU-dddd", 2),
        ("GPU-aa", 0),
        ("GPU-aaaa,0", 1),
        ("0,GPU-cccc", 1),
        ("GPU-eeee", 0),
        ("0,MIG-1", 1),
        ("none", 0),
    ],
)
def test_what_cuda_visible_devices_leaves(choice: str | None, count: int) -> None:
    """CUDA's rules hold: the list ends at the first invalid entry, and a GPU that is named twice hides all."""
    assert count_chosen_gpus(IDS, choice) == count


def test_a_torch_without_cuda_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs count as zero if torch was built without CUDA."""
    monkeypatch.setattr(distributed_gpus, "list_gpu_ids", lambda: IDS)
    monkeypatch.setattr(accelerators, "torch_has_cuda", lambda: False)
    assert count_visible_gpus({}) == 0
    monkeypatch.setattr(accelerators, "torch_has_cuda", lambda: True)
    assert count_visible_gpus({}) == 4
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 2


def _nvml(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> list[str]:
    """Replace functions of NVML; return a list that records the shutdown."""
    shut: list[str] = []
    told = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: shut.append("shut down"), **functions}
    for name, function in told.items():
        monkeypatch.setattr(pynvml, name, function)
    return shut


def _fails(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def test_gpus_in_the_order_of_their_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are listed by UUID; one whose UUID NVML cannot read counts all the same."""

    def uuid(index: int) -> str:
        if index == 1:
            _fails()
        return IDS[index]

    shut = _nvml(
        monkeypatch,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,  # pyright: ignore[reportUnknownLambdaType]
        nvmlDeviceGetUUID=uuid,
        nvmlDeviceGetMigMode=_fails,
    )
    assert list_gpu_ids() == ["GPU-aaaa-1", "unknown-1", "GPU-cccc-3"]
    assert shut == ["shut down"]


@pytest.mark.parametrize(("function", "ended"), [("nvmlInit", []), ("nvmlDeviceGetCount", ["shut down"])])
def test_a_driver_that_lists_no_gpus(function: str, ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML may not start, or not list devices: how many there are is unknown then."""
    shut = _nvml(monkeypatch, **{function: _fails})
    with pytest.raises(DriverSilent, match=r"NVML does not (start|list GPUs): "):
        list_gpu_ids()
    assert shut == ended
    with pytest.raises(OSError, match="NVML does not say how much memory a GPU has: "):
        smallest_gpu_memory()


def test_slices_of_a_gpu_are_not_counted_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows one slice of a GPU in MIG mode, whatever the number of GPUs."""
    _nvml(
        monkeypatch,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,  # pyright: ignore[reportUnknownLambdaType]
        nvmlDeviceGetMigMode=lambda handle: (handle, handle),  # pyright: ignore[reportUnknownLambdaType]
    )
    with pytest.raises(DriverSilent, match="a GPU is in MIG mode"):
        list_gpu_ids()
    with pytest.raises(DriverSilent, match="CUDA_VISIBLE_DEVICES names a slice of a GPU"):
        count_chosen_gpus(IDS, "MIG-1,MIG-2")


@pytest.mark.parametrize(("library", "count"), [(True, 3), (False, 0)])
def test_torch_is_asked_where_the_driver_is_silent(library: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and so is done only on a machine with CUDA's library."""

    def silent() -> list[str]:
        raise DriverSilent

    monkeypatch.setattr(accelerators, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(distributed_gpus, "list_gpu_ids", silent)
    monkeypatch.setattr(accelerators, "ask_torch", lambda environ: VisibleDevices("cuda", 3))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(accelerators, "_has_cuda_driver", lambda: library)
    assert count_visible_gpus() == count


def test_torch_names_its_accelerator_in_a_process_of_its_own() -> None:
    """The torch of these tests is built for the CPU."""
    assert ask_torch({"ZE_AFFINITY_MASK": "0"}) == VisibleDevices()


def test_an_accelerator_other_than_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for Intel's GPUs is asked; CUDA's devices come first where there are any."""
    monkeypatch.setattr(accelerators, "read_torch_builds", lambda: {"xpu"})
    monkeypatch.setattr(accelerators, "ask_torch", lambda: VisibleDevices("npu", 4))
    assert str(find_visible_devices()) == "4 NPUs"
    assert resources.choose_device(config()) == ("npu", "auto: 4 NPUs visible here")
    assert resources.count_ranks(config()) == RankCount(4, "auto: no launcher, 4 NPUs visible here")
    gpus(monkeypatch, 2)
    assert find_visible_devices() == VisibleDevices("cuda", 2)


def test_what_torch_was_built_with() -> None:
    """The check without importing torch agrees with torch.version.cuda."""
    import torch

    assert torch_has_cuda() == (torch.version.cuda is not None)


def gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: number)


@pytest.mark.parametrize(
    ("changes", "visible", "ranks"),
    [
        ({"parallel": {"data": 3}}, 4, RankCount(3)),
        ({}, 4, RankCount(4, "auto: no launcher, 4 GPUs visible here")),
        ({}, 1, RankCount(1, "auto: no launcher, one GPU visible here")),
        ({}, 0, RankCount(1, "auto: no launcher, no GPU visible here")),
        ({"device": "cpu"}, 4, RankCount(1, "auto: no launcher, and device is cpu")),
        ({"device": "cuda:1"}, 4, RankCount(1, "auto: no launcher, and device is cuda:1 alone")),
        ({"backend": "single"}, 4, RankCount(1, "single is one process")),
    ],
)
def test_ranks_of_our_own(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], visible: int, ranks: RankCount
) -> None:
    """A number in the config is used; `auto` means one rank for each visible GPU, or one."""
    gpus(monkeypatch, visible)
    assert resources.count_ranks(config(**changes)) == ranks


def test_ranks_of_a_launcher() -> None:
    """`auto` takes the size of the launcher's world; the same number in the config is accepted."""
    assert resources.count_ranks(config(), place(3)) == RankCount(3, "started by torchrun")
    assert resources.count_ranks(config(parallel={"data": 3}), place(3)) == RankCount(3, "started by torchrun")


def test_a_launchers_other_world() -> None:
    """A launcher's world of another size than the config's is refused."""
    with pytest.raises(WorldMismatch) as e:
        resources.count_ranks(config(parallel={"data": 4}), place(2))
    assert str(e.value) == (
        "parallel.data: 4, but torchrun started 2 processes; start 4 processes, or set parallel.data: auto"
    )


@pytest.mark.parametrize(
    ("changes", "ranks", "visible", "sentence"),
    [
        (
            {"device": "cuda"},
            2,
            0,
            "native/nothing: parallel.data: 2 ranks on cuda; no GPU visible here; set device: cpu",
        ),
        (
            {},
            4,
            2,
            "native/nothing: parallel.data: 4 ranks on cuda; 2 GPUs visible here; lower it, set device: cpu, "
            "or share one GPU with device: cuda:0",
        ),
        (
            {"device": "xpu"},
            2,
            4,
            "native/nothing: parallel.data: 2 ranks on xpu; no GPU visible here; set device: cpu",
        ),
        (
            {"device": "mps"},
            2,
            0,
            "native/nothing: parallel.data: 2 ranks on mps, which is one process; set device: cpu",
        ),
        (
            {"device": "cuda:1"},
            1,
            1,
            "native/nothing: device: cuda:1 does not exist; one GPU visible here; set device: cpu",
        ),
    ],
)
def test_too_few_devices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ranks: int, visible: int, sentence: str
) -> None:
    """Too few GPUs are refused with the numbers, before any process starts."""
    gpus(monkeypatch, visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(Unsupported) as e:
        resources.check_device_count(config(**changes), ranks)
    assert str(e.value) == sentence


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("npu", "parallel.data: 2 ranks on npu; one NPU visible here; lower it, set device: cpu"),
        (
            "npu:0",
            "parallel.data: 2 ranks on npu:0, whose tensors gloo cannot move: ranks cannot share it; "
            "set device: npu or cpu",
        ),
    ],
)
def test_ranks_share_devices_of_cuda_only(monkeypatch: pytest.MonkeyPatch, device: str, sentence: str) -> None:
    """Gloo has to move the tensors of ranks on one device, and knows none of other accelerators."""
    monkeypatch.setattr(accelerators, "find_visible_devices", lambda: accelerators.VisibleDevices("npu", 1))
    with pytest.raises(Unsupported) as e:
        resources.check_device_count(config(device=device), 2)
    assert str(e.value) == f"native/nothing: {sentence}"


def test_too_few_devices_names_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows CUDA_VISIBLE_DEVICES if it is set."""
    gpus(monkeypatch, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(Unsupported, match=r"one GPU visible here \(CUDA_VISIBLE_DEVICES=3\); lower it"):
        resources.check_device_count(config(device="cuda"), 2)


@pytest.mark.parametrize(
    ("changes", "ranks", "local", "visible"),
    [
        ({"device": "cpu"}, 64, None, 0),
        ({}, 64, None, 0),
        ({}, 2, None, 2),
        ({"device": "cuda:0"}, 4, None, 1),
        ({"device": "cuda"}, 16, 8, 8),
    ],
)
def test_enough_devices(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ranks: int, local: int | None, visible: int
) -> None:
    """The CPU always suffices; ranks need one GPU each on this machine, unless the config shares one."""
    gpus(monkeypatch, visible)
    resources.check_device_count(config(**changes), ranks, local)


def test_each_rank_of_a_launcher_may_see_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's --gpus-per-task shows each task one GPU; two of three are too few all the same."""
    gpus(monkeypatch, 1)
    resources.check_device_count(config(device="cuda"), 2, launched=True)
    gpus(monkeypatch, 2)
    with pytest.raises(Unsupported, match="3 ranks on cuda; 2 GPUs visible here"):
        resources.check_device_count(config(device="cuda"), 3, launched=True)


def test_what_auto_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device: auto` is CUDA if a GPU is visible, with the reason; a device in the config has no reason."""
    gpus(monkeypatch, 2)
    assert resources.choose_device(config()) == ("cuda", "auto: 2 GPUs visible here")
    assert resources.choose_device(config(device="cpu")) == ("cpu", "")
    gpus(monkeypatch, 0)
    assert resources.choose_device(config()) == ("cpu", "auto: no GPU visible here")


def test_one_call_takes_all_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A config without ranks and device runs one rank on each visible GPU."""
    monkeypatch.setattr(distributed_gpus, "list_gpu_ids", lambda: IDS)
    monkeypatch.setattr(accelerators, "torch_has_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    told = {"batch": {"total": 8}, "train": {"steps": 1}}
    plan = PreparedRun.of(prepare(told, code="in the script"), overwrite=False)
    assert (plan.size, plan.config.parallel.data) == (4, 4)
    monkeypatch.setattr(distributed_gpus, "list_gpu_ids", list)
    assert PreparedRun.of(prepare(told, code="in the script"), overwrite=False).size == 1
