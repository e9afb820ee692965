"""explain and check: what a run will be, said before it starts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from unipar.cli.commands.config.check import check_config
from unipar.cli.commands.config.explain import Explanation, explain_config
from unipar.config.config_source import ConfigSource, load_config_file
from unipar.errors import ConfigError, OutExists, TaskError

CONFIG = """\
task: {use: net.py:Net, args: {width: 3}}
parallel: {data: 2}
batch: {total: 8, micro: 2}
data: {workers: 1}
train:
  epochs: 3
  optimizer: {lr: 0.5}
  lr_scale: {rule: linear, base_batch_size: 4}
  clip: 1.0
compare: {strategies: ["native/*", deepspeed/gradients+library]}
"""

NET = """\
import torch
import unipar
from torch.utils.data import DataLoader

class Net(unipar.Task):
    def __init__(self, width):
        print("made")
        self.width = width

    def model(self):
        return torch.nn.Sequential(*[torch.nn.Linear(self.width, self.width) for _ in range(2)])

    def data(self):
        return DataLoader([(torch.ones(self.width), 0.0)] * 20, num_workers=2, drop_last=True)

    def loss(self, model, batch):
        return model(batch[0]).sum()
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigSource:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG, encoding="utf-8")
    Path("net.py").write_text(NET, encoding="utf-8")
    return load_config_file(Path("x.yaml"))


def changed(source: ConfigSource, *sets: str, **overrides: Any) -> ConfigSource:
    assert source.label == "x.yaml"
    return load_config_file(Path("x.yaml"), sets, overrides)


def rows(found: Explanation) -> dict[str, tuple[Any, str]]:
    return {v.key: (v.value, v.origin) for v in (*found.values, *found.follows)}


def test_every_value_has_an_origin(source: ConfigSource) -> None:
    """The line, --set, overrides, default, or how it was derived."""
    found = rows(explain_config(changed(source, "train.seed=7", **{"log.every": 5})))
    assert found["batch.total"] == (8, "line 3")
    assert found["task.args.width"] == (3, "line 1")
    assert found["train.seed"] == (7, "--set")
    assert found["log.every"] == (5, "overrides")
    assert found["train.precision"] == ("fp32", "default")
    assert found["train.optimizer.name"] == ("adamw", "default")
    assert found["batch.accumulate"] == (2, "derived: total / (micro x data) = 8 / (2 x 2)")
    assert found["out"] == ("runs/x", "derived: runs/ and the config's name")
    assert found["strategy"] == ("native/nothing", "derived: backend, parallel.shard and the backend's options")
    assert found["full learning rate"] == (
        1.0,
        "derived: train.optimizer.lr x batch.total / base_batch_size = 0.5 x 8 / 4",
    )


def test_no_key_is_left_out(source: ConfigSource) -> None:
    """Every leaf of a Config, and the options of the backend that is used."""
    keys = {v.key for v in explain_config(source).values}
    leaves = {
        "task.use task.args.width backend device parallel.data parallel.shard parallel.shard_over",
        "parallel.tensor parallel.pipeline parallel.context parallel.expert parallel.sequence parallel.schedule",
        "batch.total batch.tokens batch.max_length batch.rows batch.memory_check batch.micro batch.accumulate",
        "batch.memory batch.headroom",
        "model.weights model.blocks model.recompute model.compile model.sync_batchnorm model.offload train.local_steps",
        "data.workers data.shuffle data.last_batch data.stream train.steps train.epochs train.optimizer.name",
        "train.optimizer.lr train.optimizer.weight_decay train.optimizer.decay train.optimizer.fused",
        "train.optimizer.foreach train.optimizer.betas train.optimizer.eps train.lr_scale.rule",
        "train.lr_scale.base_batch_size train.schedule.name train.schedule.warmup train.clip",
        "train.nonfinite train.ema",
        "train.consistency_check train.precision train.seed",
        "train.parts eval.every eval.batches eval.check eval.stop log.every log.to log.memory log.trace",
        "launch.heartbeat",
        "launch.timeout launch.rendezvous_timeout launch.shutdown_timeout launch.fork launch.deadline",
        "launch.restarts checkpoint resume",
        "options.native.find_unused_parameters options.native.bucket_cap_mb options.native.wrapper",
        "options.native.vocabulary",
        "options.native.attention options.native.proof options.native.static_graph options.native.hook",
        "compare.strategies options.native.powersgd_rank options.native.powersgd_start",
        "compare.repeat compare.memory out machines train.schedule.timing",
    }
    assert keys == {key for line in leaves for key in line.split()}


def test_keys_of_another_optimizer(source: ConfigSource) -> None:
    """Those of the optimizer that is named."""
    found = rows(explain_config(changed(source, "train.optimizer={name: rmsprop}")))
    keys = [key.rpartition(".")[2] for key in found if key.startswith("train.optimizer.")]
    assert keys == ["name", "lr", "weight_decay", "decay", "alpha", "eps", "momentum", "centered", "foreach"]


@pytest.mark.parametrize(
    ("batch", "key", "value"),
    [
        ("{total: 8}", "batch.micro", (4, "derived: total / (accumulate x data) = 8 / (1 x 2)")),
        ("{total: 8}", "batch.accumulate", (1, "derived: total alone means 1")),
        (
            "{micro: 2, accumulate: 3}",
            "batch.total",
            (12, "derived: micro x accumulate x data = 2 x 3 x 2"),
        ),
    ],
)
def test_the_third_number(source: ConfigSource, batch: str, key: str, value: tuple[int, str]) -> None:
    """Whichever of the three is left out shows its arithmetic."""
    Path("x.yaml").write_text(CONFIG.replace("{total: 8, micro: 2}", batch), encoding="utf-8")
    assert rows(explain_config(changed(source)))[key] == value


def test_auto_says_what_it_came_to(source: ConfigSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number and the device, with the reason beside the line."""
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 2)
    found = rows(explain_config(changed(source, "parallel.data=auto")))
    assert found["parallel.data"] == (2, "--set; auto: no launcher, 2 GPUs visible here")
    assert found["device"] == ("cuda", "default; auto: 2 GPUs visible here")


def test_a_rate_by_the_root(source: ConfigSource) -> None:
    """sqrt shows its root; no rule, no scaling."""
    found = rows(explain_config(changed(source, "train.lr_scale.rule=sqrt", "train.lr_scale.base_batch_size=2")))
    assert found["full learning rate"] == (
        1.0,
        "derived: train.optimizer.lr x sqrt(batch.total / base_batch_size) = 0.5 x sqrt(8 / 2)",
    )
    Path("x.yaml").write_text(CONFIG.replace("lr_scale: {rule: linear, base_batch_size: 4}", ""), encoding="utf-8")
    assert rows(explain_config(changed(source)))["full learning rate"] == (
        0.5,
        "derived: train.optimizer.lr, not scaled",
    )


def test_strategies_that_are_asked_for(source: ConfigSource) -> None:
    """The config's strategy, those named, or those it compares; each with its library's settings and dtypes."""
    assert [t.strategy for t in explain_config(source).strategies] == ["native/nothing"]
    assert [t.strategy for t in explain_config(source, ["deepspeed/optimizer", "single"]).strategies] == [
        "deepspeed/optimizer",
        "single",
    ]
    compared = explain_config(source, compare=True).strategies
    assert [t.strategy for t in compared] == [
        "native/nothing",
        "native/optimizer",
        "native/gradients",
        "native/parameters",
        "deepspeed/gradients+library",
    ]
    told = compared[4].library_settings
    assert told["zero_optimization"] == {"stage": 2}
    assert told["gradient_clipping"] == 1.0
    assert compared[1].library_settings == {
        "DistributedDataParallel": compared[0].library_settings["DistributedDataParallel"],
        "ZeroRedundancyOptimizer": {"parameters_as_bucket_view": True},
    }
    assert list(compared[2].library_settings) == ["fully_shard"]
    assert compared[4].dtypes == {
        "parameter": "fp32",
        "master": "fp32 shards",
        "gradient": "fp32",
        "reduction": "fp32",
        "compute": "fp32",
    }


def test_a_strategy_that_cannot_run(source: ConfigSource) -> None:
    """The reason is shown in place of the library's settings."""
    (told,) = explain_config(changed(source, "train.precision=fp64"), ["deepspeed/optimizer"]).strategies
    assert told.note.startswith(
        "deepspeed/optimizer: train.precision: fp64 is not available: ZeRO keeps its masters in fp32"
    )
    assert told.library_settings == told.dtypes == {}


def test_a_rule_until_the_parameters_are_known(source: ConfigSource) -> None:
    """Scaled buckets depend on the model, which only --deep makes."""
    (told,) = explain_config(source, ["deepspeed/gradients"]).strategies
    assert (
        told.library_settings["zero_optimization"]["reduce_bucket_size"] == "parameters // 32 * 2, from 65,536 to 5e8"
    )
    (told,) = explain_config(source, ["deepspeed/gradients"], deep=True).strategies
    assert told.library_settings["zero_optimization"]["reduce_bucket_size"] == 65_536


def test_deep(source: ConfigSource, capsys: pytest.CaptureFixture[str]) -> None:
    """The task's own code tells the rest: parameters, blocks, samples, what its DataLoader says."""
    found = rows(explain_config(source, deep=True))
    assert found["parameters"] == (24, "the task's model(); 24 of them are trained")
    assert found["samples"] == (20, "the task's data(); 2 batches of 8 an epoch")
    assert found["train.steps"] == (6, "derived: epochs x batches an epoch = 3 x 2")
    assert found["model.blocks"] == (["0", "1"], "default; auto: found in the model")
    assert found["data.workers"] == (1, "line 4; the task's DataLoader says 2")
    assert found["data.shuffle"] == (False, "the task's DataLoader")
    assert found["data.last_batch"] == ("drop", "the task's DataLoader")
    assert capsys.readouterr().out == ""  # what the task prints does not mix with what explain says


def test_layers_in_fp8(source: ConfigSource) -> None:
    """Which they are, by what they multiply on the config's device, and that none can be."""
    wide = changed(source, "train.precision=fp8", "task.args.width=16", "device=cpu")
    assert rows(explain_config(wide, deep=True))["products in fp8"] == (
        "fp8",
        "fp8 (tensorwise, emulated in fp32) in 2 of 2 linear layers: 0, 1",
    )
    assert "products in fp8" not in rows(explain_config(source, deep=True))
    with pytest.raises(ConfigError, match=r"2 linear layers is one: 0 \(3 to 3, not divisible by 16\)"):
        explain_config(changed(source, "train.precision=fp8", "device=cpu"), deep=True)


def test_the_size_of_a_checkpoint(source: ConfigSource) -> None:
    """Weights of 24 numbers with their momentum are 192 bytes; the room is that of the nearest folder that is there."""
    momentum = ("train.optimizer.name=sgd", "train.optimizer.momentum=0.9")
    told = rows(explain_config(changed(source, *momentum, "checkpoint.every=10"), deep=True))["checkpoint bytes"]
    assert told[0] == 192
    assert re.fullmatch(
        r"weights, buffers and optimizer state, 192 B; 4 at a time are 768 B, "
        rf"and {re.escape(str(Path.cwd()))} has \S+ \S+ free",
        told[1],
    )
    best = changed(source, *momentum, "checkpoint={keep: 1, best: {keep: 2}}", "train.precision=fp64")
    told = rows(explain_config(best, deep=True))["checkpoint bytes"]
    assert told[0] == 384
    assert "384 B; 4 at a time are 1.5 KiB, " in told[1]
    assert "checkpoint bytes" not in rows(explain_config(source, deep=True))  # no section, no checkpoint


def test_the_size_of_a_checkpoint_beside_frozen_weights(source: ConfigSource) -> None:
    """The first layer is not trained: 48 bytes once, and 12 numbers with their momentum in each checkpoint."""
    net = NET.replace("return torch.nn.Sequential(", "layers = torch.nn.Sequential(").replace(
        "    def data(self):", "        layers[0].requires_grad_(False)\n        return layers\n\n    def data(self):"
    )
    Path("net.py").write_text(net, encoding="utf-8")
    momentum = ("train.optimizer.name=sgd", "train.optimizer.momentum=0.9")
    told = rows(explain_config(changed(source, *momentum, "checkpoint.frozen=reference"), deep=True))
    assert told["checkpoint bytes"][0] == 96
    assert told["checkpoint bytes"][1].startswith(
        "trained weights, buffers and optimizer state, 96 B; frozen weights, 48 B, once; 4 at a time are 432 B, and "
    )
    copied = rows(explain_config(changed(source, *momentum, "checkpoint.every=10"), deep=True))
    assert copied["checkpoint bytes"][0] == 144


def test_what_the_task_raises(source: ConfigSource) -> None:
    """The user's own error, with its file and line."""
    Path("net.py").write_text(NET.replace('print("made")', "1 / 0"), encoding="utf-8")
    with pytest.raises(TaskError) as e:
        explain_config(source, deep=True)
    file = Path("net.py").resolve()
    assert str(e.value) == f"the task's file raised ZeroDivisionError: division by zero ({file}, line 7)"


def test_plain_text(source: ConfigSource) -> None:
    """In a pipe columns are aligned, and nothing is cut off."""
    lines = explain_config(source).plain().splitlines()
    assert lines[0] == "x.yaml"
    assert lines[1].split() == ["key", "value", "from"]
    assert "batch.accumulate                       2" in "\n".join(lines)
    assert "train.optimizer.betas                  [0.9, 0.999]" in "\n".join(lines)
    assert "train.steps                            null" in "\n".join(lines)
    assert "dtypes" in lines


def test_json(source: ConfigSource) -> None:
    """The same as data."""
    told = json.loads(explain_config(source, deep=True).to_json())
    assert told["label"] == "x.yaml"
    assert {"key": "train.clip", "value": 1.0, "origin": "line 9"} in told["values"]
    assert told["strategies"][0]["library_settings"]["DistributedDataParallel"]["bucket_cap_mb"] == 25


def test_a_terminal(source: ConfigSource, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in a drawn table."""
    monkeypatch.setenv("COLUMNS", "100")
    explain_config(source, ["single"]).draw()
    drawn = capsys.readouterr().out
    assert "batch.accumulate" in drawn
    assert "plain PyTorch" in drawn


def test_check_says_what_would_run(source: ConfigSource) -> None:
    """Strategy, ranks, batch, task, strategies to compare and folder, in a few lines."""
    Path("x.yaml").write_text(CONFIG + "device: cpu\n", encoding="utf-8")
    use = f"{Path('net.py').resolve()}:Net"
    said = " ".join(check_config(changed(source)).split())
    assert said == (
        "x.yaml: good strategy native/nothing, 2 ranks on cpu batch total 8 = micro 2 x accumulate 2 x data 2 "
        f"task {use}, checked without importing it (--deep imports it) "
        "compare 5 strategies: native/*, deepspeed/gradients+library out runs/x"
    )
    assert f"task {use}, imported and created" in " ".join(check_config(changed(source), deep=True).split())


def test_check_without_a_task(source: ConfigSource) -> None:
    """A script may give it."""
    Path("x.yaml").write_text(CONFIG.partition("\n")[2], encoding="utf-8")
    assert "task      not in this config; a script passes it to unipar.launch" in check_config(changed(source))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            "batch.micro=3",
            ConfigError,
            "batch.total (8) is not a multiple of micro x data (3 x 2 = 6); the nearest totals are 6 and 12",
        ),
        (
            "parallel={shard: gradients, shard_over: 3}",
            ConfigError,
            "parallel.shard_over (3) does not divide the number of ranks (2): give a divisor of it, or leave "
            "shard_over out, so that all ranks split one copy",
        ),
        (
            "compare.strategies=[horovod/optimizer]",
            ConfigError,
            "x.yaml: compare.strategies (--set): horovod/optimizer: there is no such strategy; "
            "horovod has: horovod/nothing",
        ),
        ("task.use=net.py:Nat", TaskError, "task.use: {folder}/net.py has no class Nat; did you mean Net?"),
        (
            "task.use=nat.py:Net",
            TaskError,
            "task.use: the file {folder}/nat.py does not exist; the path is relative to the config",
        ),
        ("task.args.widht=4", TaskError, "task.args.widht: Net has no such argument; did you mean 'width'?"),
    ],
)
def test_check_refuses(source: ConfigSource, change: str, error: type[Exception], sentence: str) -> None:
    """The sentence is the one with which `run` would refuse."""
    with pytest.raises(error) as e:
        check_config(changed(source, change))
    assert str(e.value) == sentence.format(folder=Path.cwd())


def test_check_sees_an_existing_run(source: ConfigSource) -> None:
    """With `out` it is refused as `run` refuses it, unless it may be overwritten; without, the next name is free."""
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.json").write_text('{"batch": {}, "train": {}}', "utf-8")
    Path("runs/x/launch.json").write_text('{"task": {}}', "utf-8")
    assert check_config(source).splitlines()[-1] == "  out       runs/x-2"
    assert check_config(source, overwrite=True).splitlines()[-1] == "  out       runs/x"
    assert os.listdir("runs") == ["x"]
    (value,) = (v for v in explain_config(source).values if v.key == "out")
    assert (value.value, value.origin) == (
        "runs/x-2",
        "derived: runs/ and the config's name; runs/x is there already",
    )
    given = source.with_out("runs/x")
    with pytest.raises(OutExists, match=r"^out: runs/x already exists"):
        check_config(given)
    assert check_config(given, overwrite=True).startswith("x.yaml: good")


def mesh_of(found: Explanation) -> dict[str, tuple[Any, str]]:
    return {v.key: (v.value, v.origin) for v in found.strategies[0].axes}


def test_what_follows_from_the_axes_of_a_mesh(source: ConfigSource) -> None:
    """Ranks, the samples that ranks share, a pipeline's bubble as a number and in words, activations kept at a time."""
    found = explain_config(changed(source, "parallel.data=4"), ["native/parameters+pipeline2"])
    assert mesh_of(found) == {
        "ranks": (4, "derived: data 2 x pipeline 2"),
        "samples of a step": (4, "derived: batch.total / data = 8 / 2, for 2 ranks together: micro 2 x 2"),
        "pipeline bubble": (
            0.3333,
            "derived: a stage waits 33.3 % of a step, if all stages take equally long: (p - 1) / (m + p - 1) = 1 / 3, "
            "p = 2 stages, m = 2 microbatches",
        ),
        "microbatches in flight": (
            [2, 1],
            "derived: microbatches whose activations each stage keeps at the same time, the first stage first",
        ),
    }
    gpipe = mesh_of(explain_config(source, ["native/nothing+pipeline2+gpipe"]))
    assert gpipe["microbatches in flight"][0] == [4, 4]
    assert gpipe["pipeline bubble"][0] == 0.2
    interleaved = changed(source, "data.last_batch=drop")
    assert mesh_of(explain_config(interleaved, ["native/nothing+pipeline2+interleaved"]))["microbatches in flight"] == (
        [5, 3],
        "derived: microbatches whose activations each rank keeps at the same time, counted in each stage, the first "
        "rank first",
    )


def test_a_mesh_in_a_pipe(source: ConfigSource) -> None:
    """A table of its own below the library's settings, each row on one line."""
    lines = explain_config(changed(source, "parallel.pipeline=2")).plain().splitlines()
    at = lines.index("mesh of native/nothing+pipeline2")
    assert lines[at + 1].split() == ["name", "value", "from"]
    assert lines[at + 2].split("  ")[0] == "ranks"
    assert len(lines) == at + 6
    assert not any("DistributedDataParallel" in line for line in lines)


def test_a_strategy_whose_axes_do_not_divide_the_ranks(source: ConfigSource) -> None:
    """The reason is in its table, and the other strategies are shown."""
    pipeline3, plain = explain_config(source, ["native/nothing+pipeline3", "native/nothing"]).strategies
    assert pipeline3.note == "native/nothing+pipeline3 needs a multiple of 3 ranks (pipeline 3), and there are 2"
    assert (plain.note, pipeline3.axes) == ("", ())


def test_check_shows_the_mesh(source: ConfigSource) -> None:
    """Axes, and the bubble in words."""
    lines = check_config(changed(source, "parallel.pipeline=2", "batch.accumulate=2", "batch.micro=null")).splitlines()
    assert lines[1].startswith("  strategy  native/nothing+pipeline2, 4 ranks on cpu")
    assert lines[2] == "  batch     total 8 = micro 2 x accumulate 2 x data 2"
    assert lines[3] == (
        "  mesh      data 2 x pipeline 2; a stage waits 33.3 % of a step, if all stages take equally long: "
        "(p - 1) / (m + p - 1) = 1 / 3, p = 2 stages, m = 2 microbatches"
    )
