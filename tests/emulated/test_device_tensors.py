"""Tensors of the emulated device where code of a user puts them, and which devices there are."""

from __future__ import annotations

import pytest

from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.profiles import T4

pytestmark = pytest.mark.emulated


def test_a_task_that_holds_a_tensor_of_the_device(emulated: EmulatedDevice) -> None:
    """It belongs to the process of the notebook."""
    run = emulated.run("""
import torch
from unipar.task.pickled import pickle_task
try:
    pickle_task("Mine", {"table": torch.ones(3, device="cuda")})
except Exception as e:
    result = str(e)
""")
    assert run.result is not None, run.stderr
    assert run.result.startswith("Mine cannot be sent to other processes: it holds a tensor on cuda:0; create such ")


def test_random_numbers_are_put_back(emulated: EmulatedDevice) -> None:
    """What draws numbers in between changes those of neither the CPU nor the device."""
    run = emulated.run("""
import torch
from unipar.utils.seeding import kept_random_state, seed_torch
drawn = []
for between in (False, True):
    torch.zeros(1, device="cuda")
    seed_torch(5)
    with kept_random_state():
        if between:
            torch.rand(3), torch.rand(3, device="cuda")
    drawn.append([*torch.rand(2).tolist(), *torch.rand(2, device="cuda").tolist()])
result = drawn[0] == drawn[1]
""")
    assert run.result is True, run.stderr


def test_operations_of_a_model_on_the_device_are_counted(emulated: EmulatedDevice) -> None:
    """The copy without values is on the CPU, wherever the model's author has put it."""
    run = emulated.run("""
import torch
from torch import nn
from unipar.backend import Micro
from unipar.profiling.fake_model import FakeModel
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 2, device="cuda")
        self.register_buffer("scale", torch.ones(2, device="cuda"))
    def forward(self, x):
        return super().forward(x) * self.scale
micro = Micro(torch.ones(3, 4), 1.0, 0)
result = FakeModel(Scaled()).count(lambda model, batch: model(batch).sum(), [micro]).flops
""")
    assert run.result == 2 * 3 * 4 * 2 * 2, run.stderr


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("a100", ["CUDA 13.0", "NVIDIA A100-SXM4-80GB", 2, ["NCCL"]]),
        ("old-driver", ["CUDA 13.0", None, 0, []]),
    ],
)
def test_what_torch_says_of_a_device(profile: str, said: list[object], emulated: EmulatedDevice) -> None:
    """Its build, the devices that it can use, and the library of their collectives."""
    run = emulated.run(
        """
import warnings
warnings.simplefilter("ignore")
from unipar.distributed.device import describe_build, list_device_names, transport_version
names = list_device_names()
result = [describe_build(), names[0] if names else None, len(names), list(transport_version())]
""",
        profile,
    )
    assert run.result == said, run.stderr


@pytest.mark.parametrize(("choice", "count"), [("GPU-0000000", 0), ("GPU-00000002,GPU-00000001", 2), ("MIG-5", 0)])
def test_devices_by_identifier(choice: str, count: int, emulated: EmulatedDevice) -> None:
    """A beginning that fits two GPUs names none, and neither does a slice that is not there."""
    run = emulated.run(
        """
import torch
from unipar.distributed.accelerators import count_visible_gpus
result = [count_visible_gpus(), torch.cuda.device_count()]
""",
        variables={"CUDA_VISIBLE_DEVICES": choice, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
    )
    assert run.result == [count, count], run.stderr


def test_gpus_that_know_no_slices(emulated: EmulatedDevice) -> None:
    """The driver refuses the question for MIG on GPUs that are older than it."""
    run = emulated.run("from unipar.distributed.gpus import list_gpu_ids\nresult = list_gpu_ids()", "t4")
    assert run.result == [T4.gpu_uuid(0), T4.gpu_uuid(1)], run.stderr


def test_torch_that_does_not_start(emulated: EmulatedDevice) -> None:
    """Torch is asked in a process of its own where NVML is silent: what fails there is no device."""
    run = emulated.run(
        """
import os
from unipar.distributed.accelerators import ask_torch
found = [str(ask_torch())]
os.environ["SOFTCUDA_LIBRARIES"] = "/nowhere"
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
found.append(str(ask_torch()))
result = found
""",
        "no-nvml",
    )
    assert run.result == ["2 GPUs", "no GPU"], run.stderr


def test_a_model_that_its_author_spreads(emulated: EmulatedDevice) -> None:
    """What is on the CPU counts as on the run's device; a strategy that places parameters itself refuses the others."""
    run = emulated.run("""
import torch
from torch import nn
from unipar.config import Strategy
from unipar.model.create import devices_by_hand, refuse_devices_by_hand
first = torch.device("cuda:0")
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="cuda:0"), nn.Linear(2, 2, device="cuda:1"))
result = [[str(device) for device in devices_by_hand(model[:last], first)] for last in (2, 3)]
try:
    refuse_devices_by_hand(model, first, Strategy.parse("native/nothing"))
except Exception as e:
    result.append(str(e))
""")
    assert run.result is not None, run.stderr
    assert run.result[:2] == [[], ["cuda:0", "cuda:1"]]
    assert run.result[2].startswith(
        "model() spreads its parameters over 2 devices (cuda:0, cuda:1), and native/nothing places them itself: "
    )
