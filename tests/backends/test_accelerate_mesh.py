"""Accelerate's ParallelismConfig: its mesh and FSDP2 under blocks that unipar has split, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from tests.support.world import ROOT
from unipar.backend import registry
from unipar.backend.checks import check_can_run
from unipar.config import Config
from unipar.errors import Unsupported

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # libraries' own, of their own calls

LETTERS: dict[str, Any] = {
    "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
    "args": {"layers": 2, "width": 16, "heads": 2, "context": 8},
}
PADDED: dict[str, Any] = {"use": f"{ROOT}/tests/support/padded_llama.py:PaddedLlama"}
SEEN: dict[str, Any] = {"use": f"{ROOT}/tests/support/padded_llama.py:Seen"}


def _config(parallel: dict[str, Any], backend: str = "accelerate", **more: Any) -> dict[str, Any]:
    return {
        "task": LETTERS,
        "backend": backend,
        "device": "cpu",
        "parallel": {"data": 1, **parallel},
        "batch": {"total": 8, "micro": 4},
        "train": {"steps": 3, "optimizer": {"lr": 1e-2}, "clip": 0.3},
        "log": {"every": 1},
        **more,
    }


def _losses(out: Path, config: dict[str, Any]) -> list[float]:
    return [loss for _, loss in unipar.launch({**config, "out": str(out)}, quiet=True).losses]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    return _losses(tmp_path_factory.mktemp("one") / "run", _config({}, "single"))


@pytest.mark.parametrize(
    ("parallel", "sizes", "mesh", "sharded", "rows"),
    [
        ({"tensor": 2}, [1, 1, 1, 2], {"tp": 2}, False, 24),
        ({"context": 2, "shard": "parameters"}, [1, 1, 2, 1], {"cp": 2}, True, 48),
    ],
)
def test_its_mesh_and_losses_of_one_process(
    tmp_path: Path, one: list[float], parallel: dict[str, Any], sizes: list[int], mesh: dict[str, int], sharded: bool,
    rows: int,
) -> None:  # fmt: skip
    """The config's sizes, its mesh, whether its FSDP2 wrapped the blocks, and the rows that rank 0 has of a matrix."""
    seen = SEEN | {"args": LETTERS["args"] | {"out": str(tmp_path / "seen")}}
    assert _losses(tmp_path / "run", _config(parallel, task=seen)) == pytest.approx(one, abs=2e-6)
    assert (tmp_path / "seen").read_text("utf-8") == repr((sizes, mesh, sharded, rows))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("task", "parallel"),
    [
        (LETTERS, {"context": 2, "shard": "gradients"}),
        (LETTERS, {"tensor": 2, "sequence": True}),
        (LETTERS, {"data": 2, "tensor": 2, "shard": "parameters"}),
        (LETTERS, {"tensor": 2, "context": 2, "shard": "parameters"}),
        (PADDED, {"context": 2, "shard": "parameters"}),
    ],
)
def test_losses_of_one_process(tmp_path: Path, task: dict[str, Any], parallel: dict[str, Any]) -> None:
    """The norm that clips is that of the whole model; Accelerate's hooks that drop padding's masks are taken away."""
    one = _losses(tmp_path / "one", _config({"data": parallel.get("data", 1)}, "native", task=task))
    assert _losses(tmp_path / "split", _config(parallel, task=task)) == pytest.approx(one, abs=2e-6)


@pytest.mark.parametrize(
    ("made", "reasons"),
    [
        (
            _config({"data": 2, "tensor": 2}),
            [
                "parallel.data: 2 is not available with tensor 2 and shard: nothing: Accelerate's ParallelismConfig "
                "has no copies of a model (dp_replicate_size) beside tp_size without FSDP; use shard: parameters or "
                "gradients"
            ],
        ),
        (
            _config({"tensor": 2, "shard": "parameters"}),
            [
                "parallel.shard: parameters is not available with data 1 and tensor 2: nothing is left for "
                "Accelerate's FSDP2 to shard over, which its ParallelismConfig refuses; use shard: nothing"
            ],
        ),
        (
            _config({"context": 2}),
            [
                "parallel.context: 2 is not available here, only in accelerate/gradients, accelerate/parameters, "
                "native/nothing, native/optimizer, native/gradients, native/parameters: Accelerate's ParallelismConfig "
                "takes cp_size with an FSDP2 plugin only, which shards the model over these ranks as well; use shard: "
                "parameters or gradients"
            ],
        ),
        (
            _config({"data": 2, "tensor": 2, "shard": "gradients"}, options={"accelerate": {"through": "deepspeed"}}),
            ["options.accelerate.through: deepspeed is not available with tensor 2: use backend: deepspeed"],
        ),
        (
            _config({"data": 2, "tensor": 2, "shard": "parameters"}, train={"steps": 1, "precision": "bf16-master"}),
            ["train.precision: bf16-master is not available with tensor 2: take bf16-mixed, which keeps fp32 weights"],
        ),
    ],
)
def test_refused_before_any_process_starts(made: dict[str, Any], reasons: list[str]) -> None:
    """Sizes that its ParallelismConfig refuses, and what goes with no split blocks."""
    with pytest.raises(Unsupported) as caught:
        check_can_run(Config.model_validate(made))
    assert list(caught.value.reasons) == reasons


def test_explain_prints_its_config() -> None:
    """bf16-mixed is unipar's autocast here: the proof before the first step runs without."""
    made = _config({"data": 2, "tensor": 2, "shard": "parameters"}, train={"steps": 1, "precision": "bf16-mixed"})
    settings = registry.find_backend("accelerate").native_config(Config.model_validate(made))
    assert settings["Accelerator"] == {"mixed_precision": "no", "gradient_accumulation_steps": 1}
    sizes = {"dp_replicate_size": 1, "dp_shard_size": 2, "cp_size": 1, "tp_size": 2, "sp_size": 1}
    assert settings["ParallelismConfig"] == sizes


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"context": 2, "shard": "parameters"}])
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-4), ("bf16-mixed", 2e-2)])
def test_two_ranks_on_gpus(tmp_path: Path, precision: str, allowed: float, parallel: dict[str, Any]) -> None:
    """With two GPUs over NCCL, else both ranks on one over gloo; Accelerate gets plugin and sizes at its start."""
    one = _losses(tmp_path / "one", _config({}, "native"))
    device = "cuda" if torch.cuda.device_count() > 1 else "cuda:0"
    made = _config(parallel, device=device)
    made["train"] |= {"precision": precision}
    assert _losses(tmp_path / "split", made) == pytest.approx(one, abs=allowed)
