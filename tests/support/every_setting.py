"""Each key of the config with a value that is not its default, and how a run shows that it obeys it.

`python -m tests.support.every_setting` prints keys x sources x strategies: obeyed or refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.backend import registry
from unipar.backend.checks import (
    CheckedSource,
    check_run_settings,
    check_strategy,
    given_source,
    in_strategy,
    read_source,
    with_earlier_changes,
)
from unipar.backend.offered_strategies import strategies_of_backend
from unipar.config import Config, Strategy
from unipar.config.sections.strategy import AXES, Axes
from unipar.config.settled import SettledConfig
from unipar.distributed.place import Place
from unipar.errors import UniparError
from unipar.training.setup import open_run

Values = Mapping[str, Any]
"""Dotted keys of a config with their values."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value of a key, and the fact of a run that it changes."""

    value: Any
    beside: Values = field(default_factory=dict[str, Any])
    """Further keys that the value needs; the run that it is held against has them, too."""

    without: tuple[str, ...] = ()
    """Keys of BASE that the value takes the place of."""

    alone: bool = False
    """Whether the run that it is held against is that of BASE, as what is beside the value means nothing without it."""

    shows: str = ""
    """Fact of a run of one process that differs, see `play`; or `library`: what the library of `strategy` is told."""

    strategy: str = "single"
    test: str = ""
    """Test that shows the effect where a run of one process cannot: file::name."""


BASE: Values = {
    "device": "cpu",
    "batch.total": 4,
    "batch.micro": 2,
    "train.steps": 6,
    "train.seed": 3,
    "train.optimizer": {"name": "sgd", "lr": 0.1},
    "log.every": 1,
}

_EVALUATING: Values = {"eval.every": 2}
_SAVING: Values = {"checkpoint.every": 2, "checkpoint.async": False}
_ADAM: Values = {"train.optimizer": {"name": "adamw", "lr": 0.1, "fused": False, "foreach": False}}
_DECAYING: Values = {"train.optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.5}}
_MOMENTUM: Values = {"train.optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
_RMSPROP: Values = {"train.optimizer": {"name": "rmsprop", "lr": 0.1}}
_MUON: Values = {"train.optimizer": {"name": "muon", "lr": 0.1}}
_WARM: Values = {"train.schedule.warmup": 2}
_TOKENS: Values = {"batch.tokens": 20, "batch.micro": 10}
_COUNTED = ("batch.total", "batch.micro")
_COSINE: Values = {"train.schedule": {"name": "cosine"}}
_WSD: Values = {"train.schedule": {"name": "wsd", "decay": 3}}
_PIPELINE: Values = {"parallel.pipeline": 2}
_SHARDED: Values = {"parallel.shard": "parameters", "parallel.data": 4, "batch.micro": 1}
_SUBMITTED = "tests/jobs/test_slurm_jobs.py::test_its_directives"
_TRACED = "tests/training/tracing/test_step_trace.py"
_COMPARED = "tests/comparison/test_compare.py::test_steps_are_cut_into_warm_up_and_rounds"

SETTINGS: Mapping[str, Setting] = {
    "task.use": Setting(value="tests/support/traveller.py:Line", test="tests/task/test_task.py::test_look_refuses"),
    "task.args": Setting(value={"width": 3}, test="tests/task/test_task.py::test_look_refuses"),
    "backend": Setting(value="native", test="tests/backend/test_checks.py::test_settings_are_obeyed"),
    "device": Setting(value="cuda", test="tests/backend/test_resources.py::test_what_auto_computes_on"),
    "parallel.data": Setting(value=2, strategy="native", test="tests/backend/test_checks.py::test_settings_are_obeyed"),
    "parallel.shard": Setting(value="parameters", strategy="native", shows="library"),
    "parallel.shard_over": Setting(value=2, beside=_SHARDED, strategy="native", shows="library"),
    "parallel.tensor": Setting(value=2, strategy="native", shows="library"),
    "parallel.pipeline": Setting(value=2, strategy="native", shows="library"),
    "parallel.context": Setting(value=2, strategy="native", shows="library"),
    "parallel.sequence": Setting(
        value=True, beside={"parallel.tensor": 2}, strategy="native",
        test="tests/backends/test_sequence_parallel.py::test_parts_of_a_sequence_compute_the_whole",
    ),
    "parallel.schedule": Setting(
        value="gpipe", beside=_PIPELINE, strategy="native",
        test="tests/backends/test_torch_schedules.py::test_what_they_run",
    ),
    "batch.total": Setting(value=8, shows="batches"),
    "batch.tokens": Setting(value=20, without=_COUNTED, alone=True, beside={"batch.micro": 10}, shows="batches"),
    "batch.max_length": Setting(value=1, without=_COUNTED, beside=_TOKENS, shows="error"),
    "batch.rows": Setting(value="packed", without=_COUNTED, beside=_TOKENS, shows="batches"),
    "batch.memory_check": Setting(value=True, without=_COUNTED, beside=_TOKENS, shows="events"),
    "batch.micro": Setting(value=1, shows="batches"),
    "batch.accumulate": Setting(value=4, without=("batch.micro",), shows="batches"),
    "batch.memory": Setting(
        value="1GiB", beside={"batch.micro": "auto"},
        test="tests/launcher/micro_batch/test_trials.py::test_the_largest_that_fits",
    ),
    "batch.headroom": Setting(
        value="20%", beside={"batch.micro": "auto", "batch.memory": "1GiB"},
        test="tests/launcher/micro_batch/test_trials.py::test_the_largest_that_fits",
    ),
    "model.weights": Setting(value="WEIGHTS", shows="losses"),
    "model.weights.file": Setting(value="WEIGHTS", shows="losses"),
    "model.weights.only": Setting(value=["head.*"], beside={"model.weights.file": "WEIGHTS"}, shows="losses"),
    "model.weights.strict": Setting(value=False, beside={"model.weights.file": "PARTIAL"}, shows="error"),
    "model.blocks": Setting(value="none", beside={"model.recompute": "blocks"}, shows="error"),
    "model.recompute": Setting(value="blocks", shows="calls"),
    "model.compile": Setting(value="model", test="tests/model/test_transforms.py::test_compiled_means_compiled"),
    "model.compile.what": Setting(value="model", test="tests/model/test_transforms.py::test_compiled_means_compiled"),
    "model.compile.backend": Setting(
        value="aot_eager", test="tests/model/test_transforms.py::test_a_compiler_that_is_not_there",
    ),
    "model.sync_batchnorm": Setting(
        value=True, beside={"device": "cuda"}, test="tests/backends/test_gpu.py::test_sync_batchnorm"),
    "model.offload": Setting(value="parameters", beside={"device": "cuda", "parallel.shard": "parameters"},
                             strategy="native", shows="library"),
    "data.workers": Setting(value=1, shows="workers"),
    "data.shuffle": Setting(value=False, shows="batches"),
    "data.last_batch": Setting(value="drop", beside={"train.steps": None, "train.epochs": 1}, shows="batches"),
    "data.stream": Setting(value="shards", test="tests/data/test_stream.py::test_parts_are_read_once"),
    "train.steps": Setting(value=4, shows="batches"),
    "train.epochs": Setting(value=1, without=("train.steps",), alone=True, shows="batches"),
    "train.optimizer.name": Setting(value="adamw", shows="optimizer"),
    "train.optimizer.lr": Setting(value=0.05, shows="rates"),
    "train.optimizer.weight_decay": Setting(value=0.5, shows="optimizer"),
    "train.optimizer.decay": Setting(value="matrices", beside=_DECAYING, shows="optimizer"),
    "train.optimizer.fused": Setting(value=False, shows="optimizer"),
    "train.optimizer.foreach": Setting(
        value=True, beside={"train.optimizer": {"name": "sgd", "lr": 0.1, "fused": False}}, shows="optimizer"),
    "train.optimizer.momentum": Setting(value=0.5, shows="optimizer"),
    "train.optimizer.nesterov": Setting(value=True, beside=_MOMENTUM, shows="optimizer"),
    "train.optimizer.betas": Setting(value=[0.5, 0.9], beside=_ADAM, shows="optimizer"),
    "train.optimizer.eps": Setting(value=1e-3, beside=_ADAM, shows="optimizer"),
    "train.optimizer.alpha": Setting(value=0.5, beside=_RMSPROP, shows="optimizer"),
    "train.optimizer.centered": Setting(value=True, beside=_RMSPROP, shows="optimizer"),
    "train.optimizer.block": Setting(
        value=64, beside={"train.optimizer": {"name": "adamw-8bit"}},
        test="tests/optimizers/test_adamw_8bit.py::test_rows_that_are_whole_blocks"),
    "train.optimizer.ns_steps": Setting(value=2, beside=_MUON, shows="losses"),
    "train.optimizer.ns_coefficients": Setting(value=[2.0, -1.5, 0.5], beside=_MUON, shows="losses"),
    "train.optimizer.ns_eps": Setting(value=10.0, beside=_MUON, shows="losses"),
    "train.optimizer.ns_precision": Setting(value="bf16", beside=_MUON, shows="losses"),
    "train.optimizer.adjust_lr": Setting(
        value="original", beside={"train.optimizer": {"name": "muon", "lr": 0.1, "adamw": {"lr": 0.1}}},
        shows="losses"),
    "train.optimizer.matrices": Setting(value=["body.0.inner.weight"], beside=_MUON, shows="optimizer"),
    "train.optimizer.adamw_for": Setting(value=["body.0.inner.weight"], beside=_MUON, shows="optimizer"),
    "train.optimizer.adamw.lr": Setting(value=0.01, beside=_MUON, shows="rates"),
    "train.optimizer.adamw.weight_decay": Setting(value=0.5, beside=_MUON, shows="optimizer"),
    "train.optimizer.adamw.betas": Setting(value=[0.5, 0.9], beside=_MUON, shows="losses"),
    "train.optimizer.adamw.eps": Setting(value=1e-2, beside=_MUON, shows="losses"),
    "train.lr_scale.rule": Setting(
        value="linear", beside={"train.lr_scale": {"rule": "sqrt", "base_batch_size": 2}}, shows="rates"),
    "train.lr_scale.base_batch_size": Setting(
        value=2, beside={"train.lr_scale": {"rule": "linear", "base_batch_size": 3}}, shows="rates"),
    "train.schedule.name": Setting(value="linear", shows="rates"),
    "train.schedule.warmup": Setting(value=2, shows="rates"),
    "train.schedule.timing": Setting(value="transformers", beside=_WARM, shows="rates"),
    "train.schedule.min_lr_ratio": Setting(value=0.5, beside=_COSINE, shows="rates"),
    "train.schedule.power": Setting(value=3.0, beside={"train.schedule": {"name": "polynomial"}}, shows="rates"),
    "train.schedule.scale": Setting(value=2, beside={"train.schedule": {"name": "inverse-root"}}, shows="rates"),
    "train.schedule.every": Setting(value=2, beside={"train.schedule": {"name": "step", "every": 3}}, shows="rates"),
    "train.schedule.milestones": Setting(value=[2], beside={"train.schedule": {"name": "step", "milestones": [3]}},
        shows="rates"),
    "train.schedule.gamma": Setting(value=0.5, beside={"train.schedule": {"name": "step", "every": 2}}, shows="rates"),
    "train.schedule.decay": Setting(value=2, beside=_WSD, shows="rates"),
    "train.schedule.shape": Setting(value="sqrt", beside=_WSD, shows="rates"),
    "train.schedule.pct_start": Setting(
        value=0.6, beside={"train.schedule": {"name": "one-cycle", "pct_start": 0.5}}, shows="rates"),
    "train.schedule.begin": Setting(
        value=0.5, beside={"train.schedule": {"name": "one-cycle", "pct_start": 0.5}}, shows="rates"),
    "train.clip": Setting(value=0.01, shows="losses"),
    "train.clip.max": Setting(value=0.01, shows="losses"),
    "train.clip.norm": Setting(
        value="fp64", beside={"train.clip.max": 0.01}, test="tests/conformance/test_conformance.py::test_agrees"),
    "train.parts": Setting(value={"model": {"clip": 0.01}}, test="tests/conformance/test_conformance.py::test_agrees"),
    "train.local_steps": Setting(value=2, strategy="native", shows="library"),
    "train.ema.decay": Setting(value=0.5, beside=_EVALUATING, shows="evaluations"),
    "train.ema.every": Setting(value=2, beside={**_EVALUATING, "train.ema.decay": 0.5}, shows="evaluations"),
    "train.ema.warmup": Setting(value=3, beside={**_EVALUATING, "train.ema.decay": 0.5}, shows="evaluations"),
    "train.consistency_check.every": Setting(value=2, shows="watched"),
    "train.precision": Setting(value="fp64", shows="dtypes"),
    "train.seed": Setting(value=4, shows="batches"),
    "eval.every": Setting(value=3, shows="evaluations"),
    "eval.batches": Setting(value=1, beside=_EVALUATING, shows="evaluations"),
    "eval.check": Setting(value=False, beside=_EVALUATING, shows="metric calls"),
    "eval.stop.metric": Setting(
        value="other", beside={**_EVALUATING, "eval.stop.patience": 1}, shows="error"),
    "eval.stop.mode": Setting(
        value="max", beside={"eval.every": 1, "eval.stop.patience": 1}, shows="batches"),
    "eval.stop.patience": Setting(
        value=1, beside={"eval.every": 1, "eval.stop.mode": "max"}, shows="batches"),
    "log.every": Setting(value=3, shows="rates"),
    "log.to": Setting(value=["tensorboard"], shows="files"),
    "log.memory": Setting(value=True, test="tests/memory/test_step_log.py"),
    "checkpoint.every": Setting(value=3, beside={"checkpoint.async": False}, shows="saves"),
    "checkpoint.keep": Setting(value=1, beside=_SAVING, shows="files"),
    "checkpoint.best.metric": Setting(value="other", beside={**_SAVING, **_EVALUATING}, shows="error"),
    "checkpoint.best.mode": Setting(
        value="max", beside={**_SAVING, "eval.every": 1, "checkpoint.keep": 1, "checkpoint.best.keep": 1},
        shows="files"),
    "checkpoint.best.keep": Setting(
        value=3, beside={**_SAVING, "eval.every": 1, "checkpoint.keep": 1, "checkpoint.best.metric": "loss"},
        shows="files"),
    "checkpoint.async": Setting(
        value=False, beside={"checkpoint.every": 2},
        test="tests/training/test_resuming.py::test_a_resumed_run_is_the_uninterrupted_one"),
    "checkpoint.to": Setting(value="ELSEWHERE", beside=_SAVING, shows="files"),
    "checkpoint.on_error": Setting(
        value="warn", beside=_SAVING, test="tests/launcher/test_checkpoints_elsewhere.py::test_a_store_that_fails"),
    "resume": Setting(value="never", test="tests/launcher/test_earlier_config.py"),
    "launch.heartbeat": Setting(
        value=30.0, test="tests/launcher/processes/test_watchdog.py::test_no_heartbeat_no_deadline"),
    "launch.timeout": Setting(
        value=200.0, test="tests/launcher/processes/test_group.py::test_gloo_on_loopback_its_timeout_and_its_abort"),
    "launch.rendezvous_timeout": Setting(
        value=300.0, test="tests/distributed/test_meeting.py::test_all_learn_who_is_where"),
    "launch.shutdown_timeout": Setting(value=5.0, test="tests/launcher/processes/test_group.py::test_grace_ends"),
    "launch.deadline": Setting(value="1h", test="tests/launcher/test_restarting.py::test_a_deadline"),
    "launch.restarts": Setting(value=1, test="tests/launcher/test_restarting.py::test_killed_ranks_start_again"),
    "launch.fork": Setting(value=False, test="tests/launcher/processes/test_starters.py::test_where_workers_are_forks"),
    "machines.on": Setting(value="slurm", test=_SUBMITTED),
    "machines.nodes": Setting(value=2, test=_SUBMITTED),
    "machines.ranks_per_node": Setting(value=2, test=_SUBMITTED),
    "machines.time": Setting(value="2h", test=_SUBMITTED),
    "machines.folder": Setting(value="own", test=_SUBMITTED),
    "machines.interface": Setting(value="lo", test="tests/distributed/test_meeting.py::test_interfaces"),
    "machines.setup": Setting(value=["module load x"], test=_SUBMITTED),
    "compare.strategies": Setting(value=["native/nothing"], test=_COMPARED),
    "compare.repeat": Setting(value=2, test=_COMPARED),
    "compare.memory": Setting(value=False, test=_COMPARED),
    "out": Setting(value="there", test="tests/config/test_source.py::test_in_another_strategy"),
    "options.accelerate.find_unused_parameters": Setting(value=True, strategy="accelerate", shows="library"),
    "options.accelerate.through": Setting(
        value="deepspeed", beside={"parallel.shard": "gradients"}, strategy="accelerate", shows="library"),
    "options.deepspeed.buckets": Setting(
        value="library", beside={"parallel.shard": "gradients"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.reduce": Setting(
        value=100, beside={"parallel.shard": "gradients"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.gather": Setting(
        value=100, beside={"parallel.shard": "gradients"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.prefetch": Setting(
        value=100, beside={"parallel.shard": "parameters"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.persistence": Setting(
        value=100, beside={"parallel.shard": "parameters"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.live": Setting(
        value=100, beside={"parallel.shard": "parameters"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.reuse": Setting(
        value=100, beside={"parallel.shard": "parameters"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.overlap": Setting(
        value=True, beside={"parallel.shard": "gradients", "device": "cuda"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.contiguous": Setting(
        value=False, beside={"parallel.shard": "gradients"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.offload_optimizer": Setting(
        value="cpu", beside={"parallel.shard": "gradients"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.offload_parameters": Setting(
        value="cpu", beside={"parallel.shard": "parameters", "device": "cuda"}, strategy="deepspeed", shows="library"),
    "options.deepspeed.offload_to": Setting(
        value="/tmp", test="tests/backends/test_deepspeed.py", strategy="deepspeed"),
    "options.deepspeed.cpu_adam": Setting(
        value="torch", test="tests/backends/test_deepspeed.py::test_its_cpu_adam_agrees", strategy="deepspeed",
        beside={"parallel.shard": "gradients", "options.deepspeed.offload_optimizer": "cpu"}),
    "options.horovod.buckets": Setting(value="library", strategy="horovod", shows="library"),
    "options.horovod.fusion_mb": Setting(value=3, strategy="horovod", shows="library"),
    "options.horovod.compression": Setting(value="fp16", strategy="horovod", shows="library"),
    "options.horovod.op": Setting(value="adasum", strategy="horovod", test="tests/backends/test_horovod.py"),
    "options.horovod.cycle_ms": Setting(value=2.0, strategy="horovod", shows="library"),
    "options.horovod.process_sets": Setting(value=[[0]], strategy="horovod", shows="library"),
    "options.native.find_unused_parameters": Setting(value=True, strategy="native", shows="library"),
    "options.native.bucket_cap_mb": Setting(value=3, strategy="native", shows="library"),
    "options.native.static_graph": Setting(value=True, strategy="native", shows="library"),
    "options.native.hook": Setting(value="fp16", strategy="native", shows="library"),
    "options.native.powersgd_rank": Setting(
        value=2, beside={"options.native.hook": "powersgd"}, strategy="native", shows="library"),
    "options.native.powersgd_start": Setting(
        value=10, beside={"options.native.hook": "powersgd"}, strategy="native", shows="library"),
    "options.native.wrapper": Setting(value="dp", strategy="native", shows="library"),
    "options.native.vocabulary": Setting(
        value="split", beside={"parallel.tensor": 2}, strategy="native",
        test="tests/backends/test_vocabulary.py"),
    "options.native.attention": Setting(
        value="ring", beside={"parallel.context": 2}, strategy="native", shows="library"),
    "options.native.proof": Setting(value="off", beside={"parallel.tensor": 2}, strategy="native", shows="library"),
    "parallel.expert": Setting(value=2, beside={"parallel.data": 2}, strategy="native", shows="library"),
    "train.nonfinite": Setting(
        value="skip", test="tests/training/test_nonfinite.py::test_an_update_that_is_left_out"),
    "checkpoint.frozen": Setting(
        value="reference", beside=_SAVING,
        test="tests/checkpoint/test_frozen_weights.py::test_frozen_weights_are_saved_once"),
    "log.trace.steps": Setting(value=[2, 3], test=f"{_TRACED}::test_microbatches_and_parts_of_the_update"),
    "log.trace.ranks": Setting(
        value=[0], beside={"log.trace.steps": [2, 3]}, test=f"{_TRACED}::test_two_ranks_of_which_one_is_traced"),
    "model.recompute.fit": Setting(
        value="1GiB", test="tests/training/test_recompute_fit.py::test_a_run_recomputes_what_was_chosen",
    ),
}  # fmt: skip


def nested(values: Values) -> dict[str, Any]:
    """Return dotted keys as a config's sections."""
    made: dict[str, Any] = {}
    for dotted, value in values.items():
        *path, name = dotted.split(".")
        into = made
        for step in path:
            into = into.setdefault(step, {})
        into[name] = {**value} if isinstance(value, dict) else value
    return made


class Probe(unipar.Task):
    """Two blocks and a head, whose words count their calls; samples of one to three tokens."""

    def __init__(self) -> None:
        self.calls = 0
        self.metric_calls = 0

    @override
    def model(self) -> nn.Module:
        model = nn.Module()
        model.body = nn.ModuleList(Block(self) for _ in range(2))
        model.head = nn.Linear(4, 1)
        model.norm = nn.BatchNorm1d(4, affine=False, momentum=0.0)
        return model

    @override
    def data(self) -> Any:
        x = torch.linspace(-1, 1, 40).reshape(10, 4)
        return TensorDataset(x, x.sum(1, keepdim=True))

    @override
    def length(self, sample: Any) -> int:
        return 2 + int(sample[0][0] > 0)

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        for block in model.body:
            x = block(x)
        return (model.head(x) - y).square().mean()

    @override
    def validation(self) -> Any:
        return self.data()

    @override
    def metrics(self, model: Any, batch: Any) -> Mapping[str, Any]:
        self.metric_calls += 1
        return {"loss": self.loss(model, batch)}


class Block(nn.Module):
    """A matrix, and a count of its calls."""

    def __init__(self, task: Probe) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.task = [task]

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.task[0].calls += 1
        return torch.tanh(self.inner(x)) + x


def play(values: Values, folder: Path) -> dict[str, Any]:
    """Return facts about a run of one process with these keys."""
    folder.mkdir()
    task, facts = Probe(), dict[str, Any]()
    place = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")
    batches: list[Any] = []
    try:
        source = given_source(nested({**values, "backend": "single"}))
        settled = SettledConfig.of(source.config, source.strategy, 1, "cpu")
        with open_run(settled, source.backend, task, place, folder) as run:
            run.on_batches(lambda read: batches.append([[list(key) for key in plan.keys] for _, plan in read]))
            facts["optimizer"] = [run.parts["model"].optimizer, _plain_groups(run.engine)]
            facts["dtypes"] = sorted({str(p.dtype) for p in run.parts["model"].module.parameters()})
            facts["workers"] = run.loader.source.settings.workers
            run.train()
    except UniparError as e:
        facts["error"] = f"{type(e).__name__}: {e}"
    log = folder / "rank-0.jsonl"
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    steps = [row for row in rows if row["event"] == "step"]
    return facts | {
        "batches": batches,
        "losses": [(row["step"], row["loss"]) for row in steps],
        "rates": [(row["step"], row["lr"]) for row in steps],
        "evaluations": [{k: v for k, v in row.items() if k != "time"} for row in rows if row["event"] == "eval"],
        "events": [row["event"] for row in rows],
        "saves": [(row["step"], sorted(row)) for row in rows if row["event"] == "checkpoint"],
        "watched": [row for row in rows if row["event"] == "watch"],
        "calls": task.calls,
        "metric calls": task.metric_calls,
        "files": sorted(str(path.relative_to(folder)) for path in folder.glob("checkpoints/*"))
        + sorted(path.name for path in folder.iterdir() if path.is_dir()),
    }


def _plain_groups(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        | {"parameters": len(group["params"])}
        for group in engine.optimizer_groups()
    ]


STRATEGIES = (
    "single",
    *(
        str(strategy)
        for name in ("native", "deepspeed")
        for strategy in strategies_of_backend(registry.find_backend(name))[:4]
    ),
    "horovod/nothing",
    *(str(strategy) for strategy in strategies_of_backend(registry.find_backend("accelerate"))[:3]),
    "accelerate/gradients+zero",
    "native/nothing+tensor2",
    "native/nothing+pipeline2",
)


def of_strategy(name: str) -> dict[str, Any]:
    """Return the keys that select a strategy."""
    strategy = Strategy.parse(name)
    can = registry.find_backend(strategy.backend).capabilities
    keys: dict[str, Any] = {"backend": strategy.backend, "parallel.shard": strategy.shard}
    keys["parallel.data"] = 1 if strategy.axes.ranks > 1 or can.alone else 2
    keys |= {f"parallel.{name}": size for name, size in strategy.axes.sizes.items()}
    variant = can.variants[strategy.variant].options if strategy.variant else {}
    return keys | {f"options.{strategy.backend}.{name}": value for name, value in variant.items()}


def from_file(values: Values, key: str, value: Any, folder: Path) -> CheckedSource:
    return read_source(_written({**values, key: value}, folder))


def from_set(values: Values, key: str, value: Any, folder: Path) -> CheckedSource:
    return read_source(_written(values, folder), [f"{key}={json.dumps(value)}"])


def from_overrides(values: Values, key: str, value: Any, folder: Path) -> CheckedSource:
    return given_source(_written(values, folder), {key: value})


def from_script(values: Values, key: str, value: Any, folder: Path) -> CheckedSource:
    return given_source(nested({**values, key: value}))


def from_earlier_run(values: Values, key: str, value: Any, folder: Path) -> CheckedSource:
    return with_earlier_changes(read_source(_written(values, folder)), [(key, value)])


def from_flag(values: Values, key: str, value: Any, folder: Path) -> CheckedSource:
    """Return the config of --backend, for keys that a strategy names."""
    chosen = {**values, key: value}
    axes = Axes(**{name: chosen.get(f"parallel.{name}", 1) for name in AXES})
    file = {k: v for k, v in values.items() if k not in (key, "backend")}
    return in_strategy(
        read_source(_written(file, folder)), str(Strategy(chosen["backend"], chosen["parallel.shard"], axes=axes))
    )


FLAGS = ("parallel.shard", "parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert")
"""Keys that --backend sets."""

VARIABLES: Mapping[str, Values] = {
    "train.precision": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "batch.accumulate": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"},
    "parallel.shard": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
    "parallel.tensor": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "4"},
    "train.clip": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_CLIPPING": "0.5"},
    "options.deepspeed.buckets": {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
    "options.deepspeed.offload_optimizer": {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
    "model.compile": {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
    "model.offload": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
    "model.recompute": {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
}  # fmt: skip
"""Variables that `accelerate launch` sets from its flags and its file, by the key that they stand for."""

SOURCES: Mapping[str, Callable[[Values, str, Any, Path], CheckedSource]] = {
    "file": from_file,
    "--set": from_set,
    "overrides": from_overrides,
    "script": from_script,
    "resumed": from_earlier_run,
}


def _written(values: Values, folder: Path) -> Path:
    file = folder / "x.yaml"
    file.write_text(json.dumps(nested(values)), "utf-8")
    return file


def settled_value(config: Config, key: str) -> Any:
    """Return the value of a key as plain data; an option that is not set is None."""
    data: Any = config.model_dump(mode="json")
    for name in key.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def outcomes(key: str, folder: Path, strategies: Sequence[str] = STRATEGIES) -> Iterator[tuple[str, str, str]]:
    """Yield source, strategy and outcome of a key: `obeyed`, `another backend's`, `lost`, or the refusal."""
    setting = SETTINGS[key]
    for strategy in strategies:
        chosen = of_strategy(strategy)
        beside = {k: v for k, v in setting.beside.items() if k not in chosen}
        base = {k: v for k, v in BASE.items() if k not in setting.without}
        values = {**base, **chosen, **beside}
        flags = {"--backend": from_flag} if key in FLAGS and strategy != "single" else {}
        for name, read in {**SOURCES, **flags}.items():
            yield name, strategy, _outcome(read, values, key, setting.value, folder)


def _outcome(
    read: Callable[[Values, str, Any, Path], CheckedSource], values: Values, key: str, value: Any, folder: Path
) -> str:
    try:
        source = read(values, key, value, folder)
        check_strategy(source.config, source.backend, source.strategy, source.places)
        check_run_settings(source)
    except UniparError as e:
        return str(e)
    kept = settled_value(source.config, key)
    if key.startswith("options.") and key.split(".")[1] not in source.backend.used_options(source.config):
        return "another backend's"
    return "obeyed" if _is_same(kept, value) else f"lost: {kept!r}"


def _is_same(kept: Any, value: Any) -> bool:
    """Return whether a settled value says what was given, in other units or with a section's defaults."""
    if isinstance(kept, dict) and isinstance(value, dict):
        return all(_is_same(kept.get(name), inner) for name, inner in value.items())
    if isinstance(kept, list) and isinstance(value, list):
        return len(kept) == len(value) and all(map(_is_same, kept, value))
    if isinstance(value, str) and isinstance(kept, int | float):
        return value in {"1GiB": kept == 2**30, "20%": kept == 0.2, "2h": kept == 7200, "1h": kept == 3600}
    if isinstance(value, str) and isinstance(kept, str) and "/" in kept:
        return kept.endswith(value.rpartition("/")[2])
    return kept == value


def main() -> None:
    """Print keys x sources x strategies, and how each key's effect is shown."""
    import tempfile

    counts = {"obeyed": 0, "refused": 0, "another backend's": 0, "lost": 0}
    with tempfile.TemporaryDirectory() as folder:
        print(f"sources: {', '.join(SOURCES)} (o obeyed, r refused, a kept for another backend)")
        print("strategies:", ", ".join(f"{i}: {name}" for i, name in enumerate(STRATEGIES)))
        for key in SETTINGS:
            marks: dict[str, str] = {}
            for _, strategy, outcome in outcomes(key, Path(folder)):
                kind = "lost" if outcome.startswith("lost") else outcome if outcome in counts else "refused"
                counts[kind] += 1
                marks[strategy] = marks.get(strategy, "") + kind[0]
            row = " ".join(m[0] if len(set(m)) == 1 else m for m in marks.values())
            shown = SETTINGS[key].shows or SETTINGS[key].test
            print(f"{key:36} {row}  {shown}")
    print(counts)
    sys.exit(bool(counts["lost"]))


if __name__ == "__main__":
    main()
