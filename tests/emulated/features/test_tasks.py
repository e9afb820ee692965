"""Tasks that are not alike on a device: large microbatches, the whole model, offloaded states, dropout in attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.commands import COMMAND_SETTINGS, losses_of_run, write_config
from tests.support.softcuda.trainings.strategies import SIZES, EmulatedTraining, judge
from unipar.memory.account import MemoryAccount
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

pytestmark = pytest.mark.emulated


def test_the_largest_microbatches_are_tried(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Their peak is said, and the run has the losses that it has without them."""
    losses: list[list[float]] = []
    for tries in (False, True):
        folder = tmp_path / str(tries)
        config = write_config(
            folder,
            task={"use": f"{ROOT}/tests/conformance/lengths.py:Counted"},
            batch={"tokens": 70, "max_length": 8, "micro": 20, "memory_check": tries},
            train={**COMMAND_SETTINGS["train"], "steps": 4},
        )
        done = emulated.unipar(["run", config])
        assert done.returncode == 0, done.stderr
        losses.append(losses_of_run(folder))
    said = " ".join(str(row.get("said")) for row in RunLog.read(run_log_path(tmp_path / "True/run", 0)))
    assert "were tried before the first step, peak " in said
    assert losses[0] == losses[1]


def test_the_whole_model(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """Shards are gathered on the device of each rank, if it has room for them."""
    task = {
        "use": f"{ROOT}/tests/support/softcuda/trainings/whole.py:WholeGPT",
        "args": {"told": str(tmp_path), **SIZES},
    }
    config = write_config(tmp_path, task=task, parallel={"data": 2, "shard": "parameters"})
    done = emulated.unipar(["run", config])
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / rank).read_text("utf-8") for rank in ("0", "1")]
    assert told[0] == told[1]
    assert told[0].endswith(" cuda")


def test_pinned_memory_of_offloaded_parameters(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """It is counted beside the device's, with the names of what is in it."""
    config = write_config(
        tmp_path,
        model={"offload": "parameters"},
        compare={"strategies": ["native/parameters"], "repeat": 1},
        train={**COMMAND_SETTINGS["train"], "steps": 13},
    )
    done = emulated.unipar(["compare", config])
    assert done.returncode == 0, done.stderr
    strategies = json.loads((tmp_path / "run/compare/compare.json").read_text("utf-8"))["strategies"]
    offloaded = [MemoryAccount.model_validate_json(json.dumps(account)) for account in strategies[-1]["memory"]]
    assert len(offloaded) == 2
    for account in offloaded:
        held = {phase.name: phase.held for phase in account.pinned}
        assert held["update"]["parameters"] > 0
        assert held["update"]["parameters"] == held["forward"]["parameters"]


def test_dropout_inside_attention_that_is_split(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A device draws it inside its kernel, where ranks that split the sequence would draw other numbers."""
    task = {"use": f"{ROOT}/tests/support/softcuda/trainings/dropping.py:DroppingGPT", "args": SIZES}
    config = write_config(tmp_path, task=task, parallel={"data": 1, "context": 2})
    done = emulated.unipar(["run", config])
    assert done.returncode == 2
    assert (
        "has dropout inside attention (0.1), which this device draws inside its kernel, not as one process would: set "
        "the model's attention dropout to 0"
    ) in done.stderr


def test_matrices_of_an_offloaded_optimizer(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A task's own optimizer that joins matrices on the device is refused where DeepSpeed keeps states elsewhere."""
    task = {"use": f"{ROOT}/tests/support/softcuda/trainings/matrices.py:OwnMuon", "args": SIZES}
    config = write_config(
        tmp_path,
        task=task,
        backend="deepspeed",
        parallel={"data": 2, "shard": "gradients"},
        model={"offload": "optimizer"},
        options={"deepspeed": {"cpu_adam": "torch"}},
    )
    done = emulated.unipar(["run", config])
    assert done.returncode == 2, done.stderr
    assert (
        "options.deepspeed.offload_optimizer: cpu is not available with Muon, which joins matrices on the device; "
        "leave one of them out"
    ) in done.stderr


def test_split_attention_in_fp64(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """No kernel of the device takes it: products of matrices do, to the losses of one process on the CPU."""
    losses: list[list[float]] = []
    for device, parallel in (("cuda", {"data": 1, "context": 2}), ("cpu", {"data": 1})):
        folder = tmp_path / device
        train = {**COMMAND_SETTINGS["train"], "precision": "fp64"}
        done = emulated.unipar(["run", write_config(folder, device=device, parallel=parallel, train=train)])
        assert done.returncode == 0, done.stderr
        losses.append(losses_of_run(folder))
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_one_device_of_two(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """`device: cuda:1` is one rank there, where the config leaves the number to unipar."""
    done = emulated.unipar(["run", write_config(tmp_path, device="cuda:1", parallel={"data": "auto"})])
    assert done.returncode == 0, done.stderr
    settled = json.loads((tmp_path / "run/launch.json").read_text("utf-8"))["settled"]
    assert (settled["device"], settled["sizes"]["ranks"]) == ("cuda:1", 1)


def test_norms_in_fp64_of_scaled_gradients(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """The parts of gradients that DeepSpeed gives each rank are unscaled before their norm is taken."""
    train = {"clip": {"norm": "fp64", "max": 1e3}, "optimizer": {"name": "sgd", "lr": 0.1}}
    clipped = EmulatedTraining("deepspeed/optimizer", {"train": train})
    runs = {precision: clipped.run(emulated, precision, tmp_path / precision) for precision in ("fp32", "fp16")}
    assert judge(clipped, "fp16", runs["fp16"], runs["fp32"].result) == ""
