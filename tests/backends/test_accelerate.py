"""Accelerate: what it really wraps with, and the user's own yaml under `accelerate launch`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import tasks
from tests.support.foreign_launch import CONFIG
from tests.support.forks import Forks
from tests.support.launchers import environment
from tests.support.running import running
from unipar.backend import checks
from unipar.config import Config
from unipar.engines.fsdp2_sharded import fsdp_groups
from unipar.errors import Unsupported
from unipar.results.run_report import Report

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries' own, of their own calls

ZERO = {"options": {"accelerate": {"through": "deepspeed"}}}


def _theirs() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.mark.parametrize(
    ("shard", "more", "wrapper", "resharded"),
    [
        ("gradients", {}, "FSDPForwardCall", False),
        ("parameters", {}, "FSDPForwardCall", True),
        ("optimizer", ZERO, "DeepSpeedEngine", None),
    ],
)
def test_its_plugins_are_in_force(
    shard: str, more: dict[str, Any], wrapper: str, resharded: bool | None, tmp_path: Path
) -> None:
    """On a machine without an accelerator it would drop them without a word, and train by DDP."""
    before = _theirs()
    with running(tasks.Plain(), tmp_path, backend="accelerate", parallel={"shard": shard}, **more) as run:
        engine: Any = run.engine
        wrapped = getattr(engine, "wrapped", None) or engine.engine
        assert type(wrapped).__name__ == wrapper
        if resharded is not None:
            block = engine.model.blocks[0]
            assert type(block).__name__.startswith("FSDP")
            [group] = fsdp_groups(block._get_fsdp_state())
            assert (group.post_forward_mesh_info is not None) is resharded
    assert _theirs() == before


def test_the_optimizers_tensors_stay_when_accelerate_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on the device after the first step: placing them would copy all of them at its fullest moment."""

    def placed(*_: object) -> None:
        raise AssertionError("the optimizer's tensors are copied")

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", placed)
    with running(tasks.Plain(), tmp_path, backend="accelerate", train={"steps": 2}) as run:
        run.task.train(run)
        engine: Any = run.engine
        assert engine.optimizer.optimizer.state


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: {precision}
num_machines: 1
num_processes: 2
machine_rank: 0
main_process_port: 0
use_cpu: false
{more}
"""
FSDP = "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: %s}"


def launched(folder: Path, yaml: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "theirs.yaml").write_text(yaml, encoding="utf-8")
    (folder / "x.yaml").write_text(CONFIG, encoding="utf-8")
    command = ["accelerate", "launch", "--config_file", "theirs.yaml", "-m", "unipar", "run", "x.yaml"]
    return subprocess.run(
        [*command, "--set", "backend=accelerate", *words],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.sweep
def test_a_yaml_that_agrees_joins(tmp_path: Path) -> None:
    """The user's FSDP file starts two ranks, which train by its FSDP2."""
    done = launched(
        tmp_path, YAML.format(kind="FSDP", precision="'no'", more=FSDP % "true"), "--set", "parallel.shard=parameters"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.read(tmp_path / "runs/x")
    assert (report.strategy, report.size, report.steps) == ("accelerate/parameters", 2, 12)


def test_ranks_with_the_variables_of_such_a_yaml_join(tmp_path: Path, forks: Forks) -> None:
    """The same without the launcher itself: two ranks that have the variables which it makes of the file."""
    (tmp_path / "x.yaml").write_text(CONFIG, encoding="utf-8")
    words = ["-m", "unipar", "run", "x.yaml", "--set", "backend=accelerate", "--set", "parallel.shard=parameters"]
    for done in forks.ranks(words, tmp_path, LAUNCHED | FSDP2 | {"ACCELERATE_USE_CPU": "true"}):
        assert done.returncode == 0, done.stdout + done.stderr
    report = Report.read(tmp_path / "runs/x")
    assert (report.strategy, report.size, report.steps) == ("accelerate/parameters", 2, 12)


@pytest.mark.sweep
def test_a_yaml_that_contradicts_is_refused(tmp_path: Path) -> None:
    """Both values, the way out, and nothing written."""
    done = launched(tmp_path, YAML.format(kind="MULTI_GPU", precision="'no'", more=""), "--set", "parallel.data=4")
    assert done.returncode != 0
    refusal = "accelerate launch started 2 processes; start 4 processes, or set parallel.data: auto"
    assert f"parallel.data: 4, but {refusal}" in done.stderr
    done = launched(tmp_path, YAML.format(kind="MULTI_GPU", precision="bf16", more=""))
    assert done.returncode != 0
    assert (
        "accelerate/nothing: accelerate launch was told mixed_precision: bf16, and the config says train.precision: "
        "fp32, which is no there; change one of them" in done.stderr
    )
    assert not (tmp_path / "runs").exists()


LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
SPLIT = {"parallel": {"shard": "parameters"}}
OVER = {"parallel": {"shard": "gradients"}, **ZERO}


SIZES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
}
"""Variables of a yaml with a parallelism_config of tp_size 2."""


@pytest.mark.parametrize(
    ("said", "sections", "reason"),
    [
        (FSDP2, {},
         "distributed_type: FSDP, and the config says parallel.shard: nothing, which is not FSDP; change one of them"),
        (FSDP2, OVER,
         "distributed_type: FSDP, and the config says parallel.shard: gradients through DeepSpeed, which is not FSDP; "
         "change one of them"),
        (FSDP2 | {"FSDP_VERSION": "1"}, SPLIT,
         "fsdp_version: 1, but unipar supports FSDP2 only; set fsdp_version: 2 there"),
        (FSDP2, {"parallel": {"shard": "gradients"}},
         "fsdp_reshard_after_forward: true, and the config says parallel.shard: gradients, which is true for "
         "parameters and false for gradients; change one of them"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, SPLIT,
         "fsdp_offload_params: true, and the config says nothing about it, so parameters stay on the device; change "
         "one of them"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, SPLIT,
         "fsdp_activation_checkpointing: true, and the config says nothing about it, as unipar's key for it is "
         "model.recompute; change one of them"),
        (DEEPSPEED, SPLIT,
         "distributed_type: DEEPSPEED, and the config says parallel.shard: parameters through FSDP2, which is not "
         "DeepSpeed; change one of them"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, OVER,
         "zero_stage: 3, and the config says parallel.shard: gradients, which is zero_stage 2; change one of them"),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, OVER,
         "gradient_accumulation_steps: 3, and the config says batch: 2 microbatches a step, which is "
         "gradient_accumulation_steps: 2; change one of them"),
        (DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, OVER,
         "gradient_clipping: 1.0, and the config says no train.clip, which would take precedence; change one of them"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, OVER,
         "offload_optimizer_device: cpu, and the config says options.deepspeed.offload_optimizer: none, which would "
         "take precedence; change one of them"),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, OVER,
         "deepspeed_config_file: ds.json, whose settings are not read here; set them in options.deepspeed, and leave "
         "it out there"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {},
         "mixed_precision: bf16, and the config says train.precision: fp32, which is no there; change one of them"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {},
         "dynamo_backend: INDUCTOR, and unipar compiles as the config's model.compile says; leave it out there"),
        (SIZES, {}, "a parallelism_config, and the config says neither parallel.tensor nor parallel.context; leave it "
         "out there"),
        (SIZES | {"PARALLELISM_CONFIG_TP_SIZE": "4"}, {"parallel": {"data": 1, "tensor": 2}},
         "parallelism_config_tp_size: 4, and the config says parallel.tensor: 2, which is tp_size: 2 there; change one "
         "of them"),
        (SIZES | {"PARALLELISM_CONFIG_SP_SIZE": "2"}, {"parallel": {"data": 1, "tensor": 2}},
         "parallelism_config_sp_size: 2, which unipar does not support; say 1 there"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {},
         "MEGATRON_LM, which unipar does not support; leave it out there"),
    ],
)  # fmt: skip
def test_contradictions(
    said: dict[str, str], sections: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a yaml says by variables, and the config says otherwise."""
    for name, value in (LAUNCHED | said).items():
        monkeypatch.setenv(name, value)
    made = {"backend": "accelerate", "batch": {"total": 8, "micro": 2}, "train": {"steps": 1}, "device": "cpu"}
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(Config.model_validate(made | sections))
    assert e.value.reasons == (f"accelerate launch was told {reason}",)


def test_a_yaml_that_says_the_same_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 with resharding is `parameters`; DeepSpeed's stage 2 is `gradients`; fp16 under DDP is autocast."""
    half = {"device": "cuda", "train": {"steps": 1, "precision": "fp16"}}
    split = {"parallel": {"data": 1, "tensor": 2}}
    fp16 = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    for said, sections in ((FSDP2, SPLIT), (DEEPSPEED, OVER), (SIZES, split), (fp16, half)):
        with monkeypatch.context() as m:
            for name, value in (LAUNCHED | said).items():
                m.setenv(name, value)
            made = {"backend": "accelerate", "batch": {"total": 8, "micro": 2}, "train": {"steps": 1}, "device": "cpu"}
            checks.check_can_run(Config.model_validate(made | sections))
