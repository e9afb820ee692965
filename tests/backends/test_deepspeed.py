"""DeepSpeed's settings: each trains to the numbers of one process, or is refused where it would do nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override
from unipar_deepspeed.partitions import keep_exact_values

import unipar
from tests.conformance import tasks
from tests.conformance.inside import CombinedState
from tests.support.running import running
from tests.support.settings import Rows, assert_agrees, run_rows
from unipar.backend import checks, registry
from unipar.config import Config
from unipar.errors import TaskError, Unsupported

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # the library's own, of its own calls

SMALL = {"reduce": 500, "gather": 300}
TIGHT = {"reduce": 500, "prefetch": 100, "persistence": 0, "live": 700, "reuse": 50}
SPREAD = {"contiguous": False}
OFFLOADED = {"offload_optimizer": "cpu", "cpu_adam": "torch"}
ADAM = {"offload_optimizer": "cpu"}


def _rows(*given: tuple[str, dict[str, Any], dict[str, Any]]) -> Rows:
    rows: Rows = []
    for strategy, options, more in given:
        through = {"accelerate": {"through": "deepspeed"}} if strategy.startswith("accelerate") else {}
        name = f"{strategy} {', '.join(f'{k}={v}' for k, v in (options | more).items())}"
        rows.append({"name": name, "strategy": strategy, "options": {"deepspeed": options, **through}, **more})
    return rows


ROWS = _rows(
    ("deepspeed/optimizer", SMALL, {}),
    ("deepspeed/gradients", SMALL, {}),
    ("deepspeed/parameters", TIGHT, {}),
    ("deepspeed/gradients", SPREAD, {}),
    ("deepspeed/parameters", SPREAD, {}),
    ("deepspeed/optimizer", OFFLOADED, {"accumulate": 4}),
    ("deepspeed/gradients", OFFLOADED, {"hop": 3}),
    ("deepspeed/parameters", OFFLOADED, {"hop": 3}),
)
COMPILED = _rows(
    ("deepspeed/optimizer", ADAM, {}),
    ("deepspeed/gradients", ADAM, {"hop": 3}),
    ("deepspeed/parameters", ADAM, {"hop": 3}),
)
Played = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return run_rows(ROWS, tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return run_rows(COMPILED, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_agrees(row: dict[str, Any], played: Played) -> None:
    """Losses, norms and parameters are those of one process."""
    assert_agrees(row, played[row["name"]])


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row["name"])
def test_its_cpu_adam_agrees(row: dict[str, Any], compiled: Played) -> None:
    """The optimizer that DeepSpeed compiles gives the numbers of PyTorch's."""
    assert_agrees(row, compiled[row["name"]])


class Wide(unipar.Task):
    """Large enough that DeepSpeed takes it to the disk."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 1))

    @override
    def data(self) -> Any:
        x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x.mean(1, keepdim=True))

    @override
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="needs libaio: apt install libaio-dev")
@pytest.mark.parametrize("parameters", ["none", "disk"])
def test_the_disk(parameters: str, tmp_path: Path) -> None:
    """Moments, and parameters too, are in files; the losses are those of one process; no file is left."""
    disk = tmp_path / "disk"
    more = {"offload_optimizer": "disk", "cpu_adam": "torch", "offload_to": str(disk), "offload_parameters": parameters}
    losses: list[list[float]] = []
    for backend, shard, options in (("single", "nothing", {}), ("deepspeed", "parameters", more)):
        run_folder = tmp_path / backend
        run_folder.mkdir()
        with running(Wide(), run_folder, backend=backend, parallel={"shard": shard}, options={"deepspeed": options},
                     train={"steps": 3, "optimizer": {"name": "adamw"}}) as run:  # fmt: skip
            run.record(3)
            run.task.train(run)
            losses.append(run.recorded_steps()["loss"])
            if backend == "deepspeed":
                assert any(f.stat().st_size >= 2**20 for f in disk.rglob("*") if f.is_file())
                with pytest.raises(TaskError) as e:
                    run.engine.restore(CombinedState({}, {}))
                assert str(e.value) == (
                    "options.deepspeed.offload_optimizer: disk cannot load a saved state; load it with cpu, or start a "
                    "new run"
                )
    assert losses[1] == pytest.approx(losses[0], abs=2e-6, rel=0)
    assert not [f for f in disk.rglob("*") if f.is_file()]


def test_no_rank_holds_the_model_whole(played: Played) -> None:
    """ZeRO-3 splits a new model at once: on a rank that did not make it one parameter at a time is whole."""
    row = ROWS[2]
    assert row["strategy"] == "deepspeed/parameters"
    made, received = played[row["name"]]
    sizes = [p.numel() for p in tasks.Grouped().model().parameters()]
    assert len(received["most"]) == len(sizes)
    assert max(received["most"]) <= max(sizes)
    assert made["most"][0] == sum(sizes)


def test_exact_values_are_rank_0s() -> None:
    """Under bf16-master the others know shapes alone: fp32 values go out one at a time when masters are there."""
    config: Any = SimpleNamespace(train=SimpleNamespace(precision="bf16-master"))
    model, worlds = nn.Linear(3, 2), list[Any]([SimpleNamespace(rank=0), SimpleNamespace(rank=1)])
    kept = [keep_exact_values(model, config, world) for world in worlds]
    assert kept[0] is not None
    assert kept[0]["weight"] is model.weight
    assert kept[1] is not None
    assert [(name, p.shape, p.device.type) for name, p in kept[1].items()] == [
        ("weight", (2, 3), "meta"),
        ("bias", (2,), "meta"),
    ]


@pytest.mark.parametrize(("shard", "offloads"), [("gradients", "cpu_offload"), ("parameters", "offload_optimizer")])
def test_it_is_offloaded(shard: str, offloads: str, tmp_path: Path) -> None:
    """The library's own word for it is up."""
    for options, wanted in (({}, False), (OFFLOADED, True)):
        (tmp_path / str(wanted)).mkdir()
        with running(tasks.Plain(), tmp_path / str(wanted), backend="deepspeed", parallel={"shard": shard},
                     options={"deepspeed": options}) as run:  # fmt: skip
            engine: Any = run.engine
            assert bool(getattr(engine.zero, offloads)) is wanted


class Early(tasks.Grouped):
    """Task whose optimizer creates its states in the constructor."""

    @override
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups)


def test_states_before_the_first_step(tmp_path: Path) -> None:
    """ZeRO cannot take them over, and says so; stage 0 can."""
    told: dict[str, Any] = {"backend": "deepspeed", "train": {"steps": 2, "optimizer": {}}}
    with pytest.raises(TaskError) as e, running(Early(), tmp_path, parallel={"shard": "gradients"}, **told):
        pass
    assert str(e.value) == (
        "deepspeed/gradients does not support Adagrad: it creates its states before the first step, for parameters "
        "that ZeRO then replaces; set parallel.shard: nothing, or backend: native"
    )
    (tmp_path / "whole").mkdir()
    with running(Early(), tmp_path / "whole", **told) as run:
        run.task.train(run)


def test_a_lock_that_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One left by a process that was killed would be waited for without end; a fresh one is somebody's."""
    from unipar_deepspeed.offload import COMPILE_LOCK_SECONDS, keep_compiled_ops

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, age in (("old", COMPILE_LOCK_SECONDS + 5), ("new", COMPILE_LOCK_SECONDS - 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        then = time.time() - age
        os.utime(tmp_path / name / "lock", (then, then))
    keep_compiled_ops()
    assert not (tmp_path / "old/lock").exists()
    assert (tmp_path / "new/lock").exists()


def test_where_compiled_ops_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder under the user's cache for each torch."""
    from unipar_deepspeed.offload import keep_compiled_ops

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "gone after the test")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_ops()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "unipar/torch_extensions" / torch.__version__)


ZERO1, ZERO2, ZERO3 = ({"parallel": {"shard": s}} for s in ("optimizer", "gradients", "parameters"))
DISK = {"offload_optimizer": "disk", "offload_to": "/tmp"}


@pytest.mark.parametrize(
    ("options", "sections", "reason"),
    [
        ({"prefetch": 100}, {}, "prefetch: 100 has no effect, as nothing is split; leave it out"),
        ({"contiguous": False}, {}, "contiguous: false has no effect, as nothing is split; leave it out"),
        ({"prefetch": "library"}, ZERO2,
         "prefetch: library has no effect with parallel.shard: gradients; leave it out"),
        ({"gather": 100}, ZERO3, "gather: 100 has no effect with parallel.shard: parameters; leave it out"),
        ({"reduce": 0}, ZERO1, "reduce: 0 elements are too few; give a number above 0"),
        ({"gather": 65_537}, ZERO1, "gather: 65537 is odd, and DeepSpeed wants an even number; give 65538"),
        ({"overlap": True}, ZERO2, "overlap has no effect on the CPU, which has no streams; leave it out"),
        (ADAM | {"offload_parameters": "disk", "offload_to": "/tmp"}, ZERO2,
         "offload_parameters: disk needs parallel.shard: parameters, as gradients leaves them whole on every rank"),
        (ADAM | {"offload_parameters": "cpu"}, ZERO3,
         "offload_parameters: cpu has no effect on the CPU, where the parameters are already; leave it out"),
        (DISK, ZERO2,
         "offload_optimizer: disk needs parallel.shard: parameters (with gradients DeepSpeed treats it as cpu); "
         "say cpu"),
        ({"offload_to": "/tmp"}, ZERO3, "offload_to has no effect, as nothing goes to disk; leave it out"),
        ({"cpu_adam": "torch"}, ZERO3,
         "cpu_adam: torch has no effect, as the optimizer is not offloaded; leave it out"),
        (OFFLOADED | SPREAD, ZERO2,
         "contiguous: false has no effect, as DeepSpeed always copies gradients that are offloaded; leave it out"),
    ],
)  # fmt: skip
def test_refusals(
    options: dict[str, Any], sections: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options are refused that DeepSpeed would accept and ignore."""
    monkeypatch.setattr("unipar_deepspeed.options._has_libaio", lambda: True)
    assert _refused(options, sections) == f"options.deepspeed.{reason}"


def _refused(options: dict[str, Any], sections: dict[str, Any]) -> str:
    made: dict[str, Any] = {"backend": "deepspeed", "device": "cpu", "batch": {"total": 8}, "train": {"steps": 1}}
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(Config.model_validate(made | {"options": {"deepspeed": options}} | sections))
    (reason,) = e.value.reasons
    return reason


def test_refusals_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, and the library that writes to it."""
    monkeypatch.setattr("unipar_deepspeed.options._has_libaio", lambda: True)
    assert _refused({"offload_optimizer": "disk"}, ZERO3) == (
        "options.deepspeed: disk needs a folder, offload_to: /path/on/that/disk"
    )
    for name in ("sgd", "rmsprop"):
        assert _refused(DISK, ZERO3 | {"train": {"steps": 1, "optimizer": {"name": name}}}) == (
            "options.deepspeed.offload_optimizer: disk supports only adam and adamw, whose moments it swaps; say cpu"
        )
    exact = {"train": {"steps": 1, "clip": {"max": 1.0, "norm": "fp64"}}}
    assert _refused(OFFLOADED, ZERO3 | exact) == (
        "train.clip: the fp64 norm is not supported for offloaded gradients; leave norm out"
    )
    assert _refused(DISK, ZERO3 | {"train": {"steps": 1, "precision": "bf16-master"}}) == (
        "train.precision: bf16-master is not supported with offload_optimizer: disk, as the masters are on the disk; "
        "say cpu"
    )
    monkeypatch.setattr("unipar_deepspeed.options._has_libaio", lambda: False)
    assert _refused(DISK, ZERO3) == (
        "options.deepspeed: disk needs libaio, which is not installed: apt install libaio-dev, or say cpu"
    )


def test_what_the_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings have DeepSpeed's names; a size that is left to the library is absent."""
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 1)
    options = {**ADAM, "offload_parameters": "cpu", "prefetch": 7, "live": "library", "overlap": True}
    made: dict[str, Any] = {"backend": "deepspeed", "batch": {"total": 8}, "train": {"steps": 1}, **ZERO3}
    config = Config.model_validate(made | {"options": {"deepspeed": options}})
    assert registry.find_backend("deepspeed").native_config(config, 16 * 70_000)["zero_optimization"] == {
        "stage": 3,
        "memory_efficient_linear": False,
        "reduce_bucket_size": 70_000,
        "stage3_prefetch_bucket_size": 7,
        "stage3_param_persistence_threshold": 4_096,
        "stage3_max_reuse_distance": 0,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }


NEUTRAL: dict[str, Any] = {"backend": "deepspeed", "device": "cuda", "batch": {"total": 8}, "train": {"steps": 1}}


@pytest.mark.parametrize(
    ("offload", "shard", "told"),
    [
        ("optimizer", "optimizer", {"offload_optimizer"}),
        ("optimizer", "parameters", {"offload_optimizer"}),
        ("parameters", "parameters", {"offload_optimizer", "offload_param"}),
    ],
)
def test_the_neutral_key_is_obeyed(offload: str, shard: str, told: set[str]) -> None:
    """model.offload is offload_optimizer, or both, and may be said twice in the same words."""
    made = NEUTRAL | {"parallel": {"shard": shard}, "model": {"offload": offload}}
    for options in ({}, {"deepspeed": {"offload_optimizer": "cpu"}}):
        config = Config.model_validate(made | {"options": options})
        zero = checks.check_can_run(config).native_config(config)["zero_optimization"]
        found = {key: value for key, value in zero.items() if key.startswith("offload")}
        assert found == {key: {"device": "cpu", "pin_memory": True} for key in told}


@pytest.mark.parametrize(
    ("offload", "shard", "options", "reason"),
    [
        ("parameters", "gradients", {},
         "model.offload: parameters needs parallel.shard: parameters, as gradients leaves them whole on every rank"),
        ("optimizer", "nothing", {},
         "model.offload: optimizer is not available here, only in deepspeed/optimizer, deepspeed/gradients, "
         "deepspeed/parameters, native/parameters"),
        ("optimizer", "gradients", {"offload_optimizer": "none"},
         "options.deepspeed.offload_optimizer: none contradicts model.offload: optimizer, which is offload_optimizer: "
         "cpu; leave one of them out"),
        ("optimizer", "parameters", {"offload_parameters": "cpu"},
         "options.deepspeed.offload_parameters: cpu contradicts model.offload: optimizer, which is "
         "offload_parameters: none; leave one of them out"),
    ],
)  # fmt: skip
def test_the_neutral_key_is_refused(offload: str, shard: str, options: dict[str, Any], reason: str) -> None:
    """The key is refused where nothing is sharded, and where it contradicts the backend's option."""
    neutral = NEUTRAL | {"parallel": {"shard": shard}, "model": {"offload": offload}}
    assert _refused(options, neutral) == reason


def test_the_neutral_key_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, whether the device was given or found."""
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 0)
    neutral = NEUTRAL | ZERO3 | {"model": {"offload": "parameters"}}
    assert _refused({}, neutral | {"device": "cpu"}) == (
        "model.offload: parameters needs CUDA: on the CPU everything is in host memory; leave it out"
    )
    assert _refused({}, neutral | {"device": "auto"}) == (
        "model.offload: parameters has no effect on the CPU, where the parameters are already; leave it out"
    )


@pytest.mark.parametrize("backend", ["deepspeed", "accelerate"])
def test_what_ranks_leave_on_the_disk(backend: str, tmp_path: Path) -> None:
    """The parent removes it when a rank fails or is killed; what is not theirs stays."""
    for name in ("optimizer/rank0", "bfloat16params/rank1", "optimizer/rank2"):
        (tmp_path / "zero_stage_3" / name).mkdir(parents=True)
        (tmp_path / "zero_stage_3" / name / "1.tensor.swp").touch()
    options = {"deepspeed": {"offload_optimizer": "disk", "offload_to": str(tmp_path)}}
    config = Config.model_validate(
        NEUTRAL | ZERO3 | {"options": options | {"accelerate": {"through": "deepspeed"}}, "backend": backend}
    )
    with pytest.raises(KeyboardInterrupt), registry.find_backend(backend).host(config, 2):
        raise KeyboardInterrupt
    assert [f.parent.name for f in tmp_path.rglob("*.swp")] == ["rank2"]


@pytest.mark.parametrize("backend", ["deepspeed", "accelerate"])
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(backend: str) -> None:
    """DeepSpeed chooses the device when it is imported: workers are started with its variable where it must not."""
    given = NEUTRAL | ZERO3 | {"options": {"accelerate": {"through": "deepspeed"}}, "backend": backend}
    for device, variables in (("cpu", {"DS_ACCELERATOR": "cpu"}), ("cuda", {})):
        with registry.find_backend(backend).host(Config.model_validate(given | {"device": device}), 2) as environment:
            assert environment == variables
