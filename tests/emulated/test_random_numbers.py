"""Random numbers of the emulated device: who draws them, who keeps them, and which devices that starts."""

from __future__ import annotations

from tests.support.softcuda.processes import EmulatedDevice


def test_a_trial_leaves_random_numbers_as_they_were(emulated: EmulatedDevice) -> None:
    """On the CPU and on the device of this process; no other device is started for it."""
    run = emulated.run("""
import warnings
import torch
from unipar.utils.seeding import kept_random_state
warnings.simplefilter("error")
torch.manual_seed(1)
torch.cuda.init()
with kept_random_state():
    inside = torch.rand(2), torch.rand(2, device="cuda")
after = torch.rand(2), torch.rand(2, device="cuda")
result = [[torch.equal(a, b) for a, b in zip(inside, after)], torch._C._cuda_hasPrimaryContext(1)]
""")
    assert run.result == [[True, True], False], run.stderr


def test_a_trial_does_not_start_cuda(emulated: EmulatedDevice) -> None:
    """A process that only plans has no device."""
    run = emulated.run("""
import torch
from unipar.utils.seeding import kept_random_state
with kept_random_state():
    pass
result = torch.cuda.is_initialized()
""")
    assert run.result is False, run.stderr


def test_a_generators_state_is_real_where_tensors_are_fake(emulated: EmulatedDevice) -> None:
    """As CUDA's, it is host memory that no mode replaces."""
    run = emulated.run("""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.manual_seed(7)
with FakeTensorMode():
    state = torch.cuda.get_rng_state()
result = state.view(torch.int64).tolist()
""")
    assert run.result == [7, 0], run.stderr
