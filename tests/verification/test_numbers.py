"""Settings of verify on a device, without one; and how torch's warnings are read."""

from __future__ import annotations

import warnings

import pytest

from unipar.verification.numbers import DeviceNumbers, numbers_on
from unipar.verification.worker.determinism import unrepeatable_operations


@pytest.mark.parametrize(("device", "kind"), [("cpu", None), ("cuda:1", "cuda"), ("npu", "npu")])
def test_devices(device: str, kind: str | None) -> None:
    """The CPU needs no settings."""
    found = numbers_on(device)
    assert (found and found.device) == kind


def test_a_workspace_that_the_user_has_chosen() -> None:
    """The user's workspace stays as it is, and is what the file says; other devices have no cuBLAS."""
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert DeviceNumbers("cuda").variables({}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert DeviceNumbers("cuda").variables(chosen) == {}
    assert DeviceNumbers("cuda").settings(chosen)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert DeviceNumbers("npu").variables({}) == {}
    assert DeviceNumbers("npu").settings({}) == {
        "fp32 products": "ieee, without TF32",
        "deterministic algorithms": "on",
    }


def test_warnings_of_torch() -> None:
    """Each operation once, by its name; other warnings are none."""
    without = (
        "does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True, ...)'"
    )
    with unrepeatable_operations() as names:
        for name in ("put_", "histc_cuda with floating point input", "put_"):
            warnings.warn(f"{name} {without}", UserWarning, stacklevel=1)
        warnings.warn("... is not deterministic because it uses CuBLAS and you have CUDA >= 10.2", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert names == ["cuBLAS", "histc_cuda with floating point input", "put_"]


def test_several_operations_are_named() -> None:
    """In the remark, and in the value of the setting."""
    numbers = DeviceNumbers("cuda", ("put_", "cuBLAS"))
    assert numbers.remark().startswith("put_, cuBLAS have no deterministic kernel on cuda: ")
    assert numbers.settings({})["deterministic algorithms"] == "on, without put_, cuBLAS"
    assert not numbers.repeats_bits
