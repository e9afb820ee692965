"""A run that goes on from what it saved has the bits of the run that was never stopped, in every engine and setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import unipar
from tests.support.run_logs import step_losses
from tests.support.running import Line, running
from tests.support.world import ROOT
from unipar.backend.offered_strategies import config_in_strategy
from unipar.config import Config, Strategy
from unipar.config.sections.train import Ema

pytestmark = pytest.mark.forked

SWEEP = pytest.mark.sweep
GPT = {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": {"layers": 2, "width": 16, "heads": 2, "context": 8}}
GAN = {"use": f"{ROOT}/tests/conformance/gan.py:Gan"}
STREAM = {**GPT, "use": f"{ROOT}/tests/support/stateful_streams.py:StreamedGPT"}
MASTERS = {"train.precision": "bf16-master"}
AVERAGED = {"train.ema": Ema(decay=0.9, every=2, warmup=1)}
HALF, STEPS = 3, 6


def saved_hashes(folder: Path, step: int) -> dict[str, str]:
    """Return the hash of each shard of a checkpoint."""
    manifest = json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text("utf-8"))
    return {name: told["xxh3_128"] for name, told in manifest["files"].items() if name.startswith("shards/")}


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [
        pytest.param("deepspeed/gradients", 2, MASTERS, id="masters of ZeRO-2"),
        pytest.param("native/parameters", 2, MASTERS, marks=SWEEP, id="masters of FSDP2"),
        pytest.param("native/optimizer", 2, MASTERS, marks=SWEEP, id="masters of each rank's part"),
        pytest.param("deepspeed/parameters", 2, MASTERS, marks=SWEEP, id="masters of ZeRO-3"),
        pytest.param("accelerate/parameters", 2, MASTERS, marks=SWEEP, id="masters of Accelerate"),
        pytest.param("deepspeed/parameters", 2, AVERAGED, marks=SWEEP, id="averages of ZeRO-3"),
        pytest.param("native/parameters", 2, MASTERS | AVERAGED, id="averages of FSDP2's masters"),
        pytest.param("native/nothing", 2, {"train.local_steps": 3}, marks=SWEEP, id="ranks apart for three steps"),
        pytest.param("native/parameters", 4, {"parallel.shard_over": 2}, marks=SWEEP, id="two copies of two shards"),
        pytest.param("deepspeed/gradients+library", 2, {}, marks=SWEEP, id="sizes of the library"),
        pytest.param("accelerate/gradients+zero", 2, {}, marks=SWEEP, id="Accelerate's DeepSpeed"),
        pytest.param("native/nothing", 2, {"task": GAN}, marks=SWEEP, id="two parts, DDP"),
        pytest.param("native/parameters", 2, {"task": GAN}, marks=SWEEP, id="two parts, FSDP2"),
        pytest.param("deepspeed/nothing", 2, {"task": GAN}, marks=SWEEP, id="two parts, DeepSpeed"),
        pytest.param("native/nothing+tensor2", 2, {"task": STREAM}, marks=SWEEP, id="a stream, matrices in parts"),
        pytest.param("native/nothing+pipeline2", 2, {"task": STREAM}, marks=SWEEP, id="a stream, stages"),
    ],
)
def test_it_goes_on_to_the_same_bits(strategy: str, ranks: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Losses of the second half, and all tensors at the end: weights, masters, moments."""
    made = Config.model_validate(
        {
            "task": GPT,
            "device": "cpu",
            "parallel": {"data": ranks},
            "batch": {"total": 8},
            "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 0.01}, "clip": 1.0},
            "checkpoint": {"every": HALF},
            "log": {"every": 1},
        }
    )
    config = config_in_strategy(made.changed(more), Strategy.parse(strategy))
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    unipar.launch(config.changed({"out": str(whole)}), quiet=True)
    start = str(whole / "checkpoints" / f"step-{HALF:08d}")
    unipar.launch(config.changed({"out": str(rest), "resume": start}), quiet=True)
    assert step_losses(rest) == step_losses(whole)[HALF:]
    assert len(step_losses(rest)) == STEPS - HALF
    assert saved_hashes(rest, STEPS) == saved_hashes(whole, STEPS)
    assert len(saved_hashes(whole, STEPS)) >= 1


class Watched(Line):
    """Task that notes where the model's parameters are when engines are about to be built."""

    device = ""

    @override
    def groups(self, model: Any) -> Any:
        self.device = next(model.parameters()).device.type
        return None


@pytest.mark.parametrize(("shard", "begun", "resumed"), [("parameters", "cpu", "meta"), ("nothing", "cpu", "cpu")])
def test_rank_0_has_no_whole_model_before_its_shards(tmp_path: Path, shard: str, begun: str, resumed: str) -> None:
    """A run that goes on makes no values that the checkpoint gives, where the engine places shards by themselves."""
    found: list[str] = []
    paths = [tmp_path / "begun", tmp_path / "resumed"]
    for path, steps, more in (
        (paths[0], 2, {}),
        (paths[1], 4, {"resume": str(paths[0] / "checkpoints/step-00000002")}),
    ):
        path.mkdir()
        sections = {"backend": "native", "parallel": {"data": 1, "shard": shard}, "train": {"steps": steps}, **more}
        with running(Watched(), path, **sections, checkpoint={"every": 2}) as run:
            run.task.train(run)
        assert isinstance(run.task, Watched)
        found.append(run.task.device)
    assert found == [begun, resumed]
