"""torch's own ring attention: its kernels' calls without values, what it cannot do, and when it is chosen.

On the CPU the ring itself runs in test_context.py, with the CPU's kernel put in: what differs on CUDA is the kernel.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from unipar_mesh.context import kernels, torch_ring
from unipar_mesh.context import spread_attention as attention
from unipar_mesh.context.sequence_layout import SequenceLayout
from unipar_mesh.context.spread_attention import Way, attend_over_ranks
from unipar_mesh.context.torch_ring import attend_in_torch_ring, why_no_torch_ring

import unipar
from tests.support.world import ROOT
from unipar.backend import registry
from unipar.config import Config

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it is imported

LETTERS: dict[str, Any] = {
    "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
    "args": {"layers": 2, "width": 32, "heads": 2, "context": 128},
}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The second of four ranks, whose collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def _tensors(dtype: torch.dtype, heads_of_keys: int, rows: int = 64) -> list[Tensor]:
    shapes = [(2, heads, rows, 16) for heads in (4, heads_of_keys, heads_of_keys)]
    return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dtype", "heads"),
    [("flash", torch.bfloat16, 4), ("flash", torch.float16, 2), ("efficient", torch.float32, 2)],
)
def test_kernels_of_a_gpu_fit_into_torchs_ring(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    dtype: torch.dtype,
    heads: int,
    causal: bool,
) -> None:
    """Without values: torch's operators take what its templates hand them, and gradients have their tensors' shapes."""
    monkeypatch.setattr(torch_ring, "kernel_for", partial(_same, kernel))
    q, k, v = _tensors(dtype, heads)
    out = attend_in_torch_ring(q, k, v, group, causal=causal, scale=0.25)
    out.float().sum().backward()
    assert (out.shape, out.dtype) == (q.shape, dtype)
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, dtype)


def test_torchs_options_are_left_as_they_were(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold for the process: a script's own context_parallel finds them as it set them."""
    options: Any = vars(importlib.import_module(torch_ring.TEMPLATES))["_cp_options"]
    monkeypatch.setattr(torch_ring, "kernel_for", partial(_same, "flash"))
    monkeypatch.setattr(options, "enable_load_balance", True)
    q, k, v = _tensors(torch.bfloat16, 4)
    attend_in_torch_ring(q, k, v, group, causal=False, scale=0.25).float().sum().backward()
    assert (options.enable_load_balance, options.convert_to_f32) == (True, True)


@pytest.mark.parametrize(
    ("kernel", "dtype", "given", "why"),
    [
        ("flash", torch.bfloat16, {}, ""),
        ("efficient", torch.float32, {}, ""),
        ("efficient", torch.float32, {"length": 192, "causal": False}, ""),
        ("flash", torch.bfloat16, {"length": 258, "causal": False}, ""),
        ("flash", torch.bfloat16, {"masked": True}, "there is a mask, and torch's ring takes is_causal alone"),
        (
            "flash",
            torch.bfloat16,
            {"dropout": 0.1},
            "there is dropout (0.1), which torch's ring would draw for each part by itself",
        ),
        (
            "flash",
            torch.bfloat16,
            {"length": 258},
            "torch's ring needs equal parts, and 2 x 2 does not divide the sequence of 258",
        ),
        (
            "flash",
            torch.bfloat16,
            {"length": 257, "causal": False},
            "torch's ring needs equal parts, and 2 does not divide the sequence of 257",
        ),
        (
            "products",
            torch.float64,
            {},
            "no kernel that gives its log-sum-exp takes float64 and heads of width 16 on this device (meta)",
        ),
        (
            "efficient",
            torch.float32,
            {"length": 192},
            "the kernel for float32 pads its log-sum-exp to multiples of 32 rows, and torch's ring merges 48",
        ),
    ],
)
def test_what_torchs_ring_cannot_do(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, given: dict[str, Any], why: str
) -> None:
    """Causal attention is merged in halves of a rank's part, other attention in whole parts."""
    monkeypatch.setattr(torch_ring, "kernel_for", partial(_same, kernel))
    asked: dict[str, Any] = {"length": 256, "ranks": 2, "causal": True, "masked": False, "dropout": 0.0}
    assert why_no_torch_ring(*_tensors(dtype, 4), **(asked | given)) == why


def test_a_torch_without_its_ring_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's names are not public: another version may lack them."""
    monkeypatch.setattr(torch_ring, "TEMPLATES", "torch.distributed.elsewhere")
    assert torch_ring.why_no_templates() == f"torch {torch.__version__} has no torch.distributed.elsewhere"
    monkeypatch.setattr(torch_ring, "TEMPLATES", "torch.distributed.tensor")
    assert torch_ring.why_no_templates() == (
        f"torch {torch.__version__} has no _templated_ring_attention in torch.distributed.tensor"
    )


def _same(value: Any, *_: Any) -> Any:
    return value


def test_flash_needs_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Turing device takes fp16 by the efficient kernel, and bf16 by products."""
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for capability, runs in (((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", partial(_same, capability))
        kernels.has_flash.cache_clear()
        assert kernels.has_flash(device) is runs
    kernels.has_flash.cache_clear()


def test_why_keys_are_gathered_is_told_once(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device where torch's ring may be chosen, rank 0's log says why an attention goes another way."""
    monkeypatch.setattr(dist, "get_rank", partial(_same, 0))
    monkeypatch.setattr(attention, "_reasons_logged", set[str]())
    with caplog.at_level(logging.WARNING, "unipar"):
        for number in range(2):
            attention.tell_once(
                f"layers.{number}", "there is a mask, and torch's ring takes is_causal alone", "ulysses"
            )
            attention.tell_once(
                "layers.0", f"torch's ring needs equal parts, and 2 x 2 does not divide {30 + number}", "gather"
            )
    assert [record.getMessage() for record in caplog.records] == [
        "parallel.context: the attention of layers.0 is not torch's own: there is a mask, and torch's ring takes "
        "is_causal alone; ulysses is used instead",
        "parallel.context: the attention of layers.0 is not torch's own: torch's ring needs equal parts, and 2 x 2 "
        "does not divide 30; gather is used instead",
    ]


def _config(parallel: dict[str, Any], device: str = "cpu", precision: str = "fp32", **options: str) -> Config:
    return Config.model_validate(
        {
            "task": LETTERS,
            "device": device,
            "parallel": {"data": 1, **parallel},
            "batch": {"total": 8, "micro": 4},
            "train": {"steps": 3, "precision": precision},
            "options": {"native": options},
        }
    )


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        (
            _config({"context": 2}, attention="torch"),
            [
                "options.native.attention: torch is not available on device: cpu: torch's ring attention calls its "
                "flash and efficient kernels, which are CUDA's; leave the option out (gather), or say ring"
            ],
        ),
        (
            _config({"context": 2}, "cuda", "fp64", attention="torch"),
            [
                "options.native.attention: torch is not available with train.precision: fp64, which neither flash nor "
                "efficient kernels take; leave the option out"
            ],
        ),
        (_config({"context": 2}, "cuda", "bf16-mixed", attention="torch"), []),
    ],
)
def test_refused_before_any_process_starts(config: Config, sentences: list[str]) -> None:
    """The CPU has neither kernel, and fp64 has none anywhere."""
    assert list(registry.find_backend("native").refuse(config)) == sentences


def test_a_run_on_the_cpu_is_refused(tmp_path: Path) -> None:
    """The command says it at once."""
    config = _config({"context": 2}, attention="torch").model_dump(exclude_unset=True) | {"out": str(tmp_path)}
    with pytest.raises(unipar.Unsupported, match=re.escape("options.native.attention: torch is not available on")):
        unipar.launch(config, quiet=True)


@pytest.mark.parametrize(
    ("device", "options", "told"),
    [
        (
            "cpu",
            {},
            "ulysses for attention whose heads divide and in which it sends fewer bytes than gather, else gather; "
            "torch's own ring attention has kernels for CUDA only",
        ),
        (
            "cuda",
            {},
            "torch's own ring attention, where it can do it; else ulysses for attention whose heads divide and in "
            "which it sends fewer bytes than gather, else gather, and rank 0's log says why",
        ),
        (
            "cpu",
            {"attention": "ulysses"},
            "ulysses: ranks trade their positions for some of the heads, by an all-to-all, and back by another",
        ),
        ("cpu", {"attention": "ring"}, "ring: keys and values pass from rank to rank"),
        ("cuda", {"attention": "gather"}, "gather: keys and values of all ranks"),
        ("cuda", {"attention": "torch"}, "torch's own ring attention; what it cannot do is refused"),
    ],
)
def test_explain_tells_the_way_of_attention(device: str, options: dict[str, str], told: str) -> None:
    """Among the settings that the library is given."""
    settings = registry.find_backend("native").native_config(_config({"context": 2}, device, **options))
    assert settings["attention"] == told


def test_without_context_there_is_nothing_to_tell() -> None:
    assert "attention" not in registry.find_backend("native").native_config(_config({"tensor": 2}))


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["torch", "auto"])
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-4), ("bf16-mixed", 2e-2)])
def test_two_ranks_of_a_gpu_cut_sequences(tmp_path: Path, precision: str, allowed: float, way: str) -> None:
    """Sequences of 128 are 4 parts of 32: fp32 takes the efficient kernel, autocast takes flash; losses are the CPU's.

    The proof before the first step compares gradients as well. With two GPUs each rank has one, over NCCL.
    """
    device = "cuda" if torch.cuda.device_count() > 1 else "cuda:0"
    losses: list[list[float]] = []
    for name, where, context in (("one", "cpu", 1), ("cut", device, 2)):
        options = {"attention": way} if context > 1 else {}
        asked = _config({"context": context}, where, precision if context > 1 else "fp32", **options)
        config = asked.model_dump(exclude_unset=True) | {"log": {"every": 1}, "out": str(tmp_path / name)}
        losses.append([loss for _, loss in unipar.launch(config, quiet=True).losses])
    assert losses[1] == pytest.approx(losses[0], abs=allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_one_rank_of_torchs_ring_on_a_gpu(tmp_path: Path, dtype: torch.dtype, allowed: float, causal: bool) -> None:
    """A ring of one is the kernel alone: results and gradients are those of products in fp64."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    try:
        torch.manual_seed(0)
        found: list[list[Tensor]] = []
        given = [torch.randn(2, heads, 64, 16, device="cuda") for heads in (4, 4, 4)]
        ways: list[tuple[torch.dtype, Way]] = [(torch.float64, "gather"), (dtype, "torch")]
        for kind, way in ways:
            q, k, v = (t.to(kind).requires_grad_() for t in given)
            out = attend_over_ranks(
                q, k, v, SequenceLayout(64, 1, 0), dist.group.WORLD, way=way, name="block", causal=causal,
                mask=None, dropout=0.0, scale=None,
            )  # fmt: skip
            out.float().square().sum().backward()
            assert q.grad is not None
            assert k.grad is not None
            assert v.grad is not None
            found.append([out.detach(), q.grad, k.grad, v.grad])
    finally:
        dist.destroy_process_group()
    for mine, whole in zip(found[1], found[0], strict=True):
        assert float((mine.double() - whole.double()).abs().max()) < allowed * float(whole.abs().max())
