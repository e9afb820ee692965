"""Numbers of a device, as the emulator varies them: what decides their last digits, and what verify makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.softcuda.processes import EmulatedDevice

pytestmark = pytest.mark.emulated

ATOMICS = {"SOFTCUDA_ATOMICS": "1"}
"""Variable with which sums by atomics differ each time."""

TASKS = '''
import json, os, torch, unipar
from torch import nn
from torch.nn import functional as F


class Exact(unipar.Task):
    """A task that allows TF32 itself, and notes what is in force in its loss."""

    def model(self):
        torch.set_float32_matmul_precision("high")
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))

    def data(self):
        drawn = torch.Generator().manual_seed(0)
        images = torch.randn(64, 1, 8, 8, generator=drawn)
        return torch.utils.data.TensorDataset(images, torch.randint(0, 2, (64,), generator=drawn))

    def loss(self, model, batch):
        strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        kernels = torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
        if batch[0].dtype is torch.float32:  # not in the task probe, which is in fp64
            with open(os.environ["NOTES"], "a") as file:
                file.write(json.dumps([*strict, *tf32, *kernels, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]) + chr(10))
        return F.cross_entropy(model(batch[0]), batch[1])


class Pooled(Exact):
    """A task with an operation that CUDA has no deterministic kernel for."""

    def model(self):
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 2))
'''

POOLING = "adaptive_avg_pool2d_backward_cuda"
ATTENTION = "flash for 16 bits, efficient for fp32; not cuDNN's, which split sequences cannot use"


def verify(emulated: EmulatedDevice, folder: Path, task: str, **changes: Any) -> tuple[str, dict[str, Any], set[str]]:
    """Return what verify prints, its file, and the settings that the task's loss has met, each once."""
    (folder / "tasks.py").write_text(TASKS, "utf-8")
    settings: dict[str, Any] = {
        "task": {"use": f"{folder}/tasks.py:{task}"},
        "device": "cuda",
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 3, "optimizer": {"name": "adamw", "lr": 0.01}},
        "parallel": {"data": 2},
        "out": str(folder / "run"),
        **changes,
    }
    (folder / "x.yaml").write_text(json.dumps(settings), "utf-8")
    words = ["verify", str(folder / "x.yaml"), "--strategies", "native/parameters", "--details"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES", str(folder / "notes"))
        patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        done = emulated.unipar(words, variables=ATOMICS)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "run/verify/verify.json").read_text("utf-8"))
    return " ".join(done.stdout.split()), found, set((folder / "notes").read_text("utf-8").splitlines())


def test_what_verify_sets(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """No TF32, though the task allows it, deterministic kernels, no search: bit for bit, and said in verify.json."""
    said, found, notes = verify(emulated, tmp_path, "Exact")
    assert found["numbers"] == {
        "fp32 products": "ieee, without TF32",
        "deterministic algorithms": "on",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "cuDNN's search for kernels": "off",
        "attention": ATTENTION,
    }
    assert found["unrepeatable"] == []
    assert "the task allows TF32 for products of fp32 matrices; it is off in this verification" in found["remarks"]
    searched, verified = (json.dumps([True, loose, "highest", *[False] * 3, ":4096:8"]) for loose in (True, False))
    assert notes == {searched, verified}
    assert "agrees; bit-for-bit equal to the replay" in said
    assert "set in every run: fp32 products: ieee, without TF32; deterministic algorithms: on; CUBLAS" in said


def test_an_operation_without_a_deterministic_kernel(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """No bits are claimed, and the allowance comes from repeats, too."""
    train = {"steps": 10, "optimizer": {"name": "adamw", "lr": 0.01}}  # in three steps losses may have the same bits
    said, found, notes = verify(emulated, tmp_path, "Pooled", train=train)
    assert found["unrepeatable"] == [POOLING]
    assert found["numbers"]["deterministic algorithms"] == f"on, without {POOLING}"
    assert (
        f"{POOLING} has no deterministic kernel on cuda: a run that is repeated has other bits, so that none is called "
        "equal bit for bit; what is allowed includes the difference between 3 runs of one process that are the same"
    ) in found["remarks"]
    names = ["one process", "one process, repeat 1", "one process, repeat 2"]
    assert set(names) <= found["one"].keys()
    repeats = [found["one"][name] for name in names]
    assert any(repeat != repeats[0] for repeat in repeats[1:]), "the emulator adds in another order each time"
    assert (found["strategies"][0]["outcome"], found["strategies"][0]["bits"]) == ("agrees", "")
    assert "bit for bit with a replay" not in said
    assert notes == {json.dumps([True, True, "highest", *[False] * 3, ":4096:8"])}


def test_nothing_changes_on_the_cpu(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """There verify sets nothing: the task's own settings stay."""
    said, found, notes = verify(emulated, tmp_path, "Exact", device="cpu")
    assert (found["numbers"], found["unrepeatable"], found["remarks"]) == ({}, [], [])
    assert notes == {json.dumps([False, False, "high", True, False, True, None])}
    assert "set in every run" not in said


def test_explain(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """`unipar explain` has what verify would set on the config's device, and nothing of the kind on the CPU."""
    (tmp_path / "tasks.py").write_text(TASKS, "utf-8")
    settings = {"task": {"use": f"{tmp_path}/tasks.py:Exact"}, "batch": {"total": 8}, "train": {"steps": 3}}
    (tmp_path / "x.yaml").write_text(json.dumps(settings), "utf-8")
    words = ["explain", str(tmp_path / "x.yaml"), "--json", "--set"]
    rows = json.loads(emulated.unipar([*words, "device=cuda"]).stdout)["follows"]
    attention = {
        "key": "attention",
        "value": ATTENTION,
        "origin": "set by `unipar verify` on cuda; a run leaves it as it is",
    }
    assert attention in rows
    assert "fp32 products" not in emulated.unipar([*words, "device=cpu"]).stdout


def test_atomics(emulated: EmulatedDevice) -> None:
    """Sums by atomics differ in the last places each time, unless deterministic algorithms are asked for."""
    run = emulated.run(
        """
import torch
def add():
    to = torch.ones(64, device="cuda")
    return to.index_add_(0, torch.arange(64, device="cuda"), torch.ones(64, device="cuda"))
loose = add(), add()
torch.use_deterministic_algorithms(True)
strict = add(), add()
result = [torch.equal(*loose), bool((loose[0] - loose[1]).abs().max() < 1e-5), torch.equal(*strict)]
""",
        variables=ATOMICS,
    )
    assert run.result == [False, True, True]


def test_attention_repeats_only_in_strict_mode(emulated: EmulatedDevice) -> None:
    """As CUDA's kernels do: their backward adds by atomics if torch only warns."""
    run = emulated.run(
        """
import torch
from torch.nn import functional as F
def gradient():
    q = torch.linspace(-1, 1, 2 * 4 * 16 * 8, device="cuda").view(2, 4, 16, 8).requires_grad_()
    F.scaled_dot_product_attention(q, q, q).square().sum().backward()
    return q.grad
torch.use_deterministic_algorithms(True, warn_only=True)
loose = gradient(), gradient()
torch.use_deterministic_algorithms(True)
result = [torch.equal(*loose), torch.equal(gradient(), gradient())]
""",
        variables=ATOMICS,
    )
    assert run.result == [False, True]


def test_tf32(emulated: EmulatedDevice) -> None:
    """Products lose 13 bits of their factors where torch allows it."""
    run = emulated.run("""
import torch
x = torch.full((4, 4), 1 + 2**-12, device="cuda")
wide = x @ x
torch.set_float32_matmul_precision("high")
result = [wide[0, 0].item(), (x @ x)[0, 0].item()]
""")
    assert run.result == [4 * (1 + 2**-11), 4.0]


def test_the_workspace_of_cublas(emulated: EmulatedDevice) -> None:
    """Without the variable, a product is an error in deterministic mode."""
    code = """
import torch
torch.use_deterministic_algorithms(True)
result = (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda"))[0, 0].item()
"""
    assert emulated.run(code, variables={"CUBLAS_WORKSPACE_CONFIG": ":16:8"}).result == 2.0
    assert "because it uses CuBLAS" in emulated.run(code, variables={"CUBLAS_WORKSPACE_CONFIG": ":8:8"}).error
