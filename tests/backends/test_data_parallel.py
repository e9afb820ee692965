"""native/nothing+dp: nn.DataParallel before any GPU is touched; tests/backends/test_gpu.py trains with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override
from unipar_native.data_parallel import (
    DataParallelEngine,
    MicrobatchRound,
    RoundDataParallel,
    group_into_rounds,
    sum_losses,
)
from unipar_native.single_process import SingleEngine

from tests.conformance.tasks import Plain
from tests.support.exports import WORDS
from tests.support.running import running
from tests.support.tiny import Tiny
from unipar.backend import LossFn, Micro, Part, checks, resources
from unipar.backend import offered_strategies as strategies
from unipar.backend.resources import RankCount
from unipar.cli.commands.config.explain import explain_config
from unipar.config import Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.config.settled import SettledConfig
from unipar.conversion.export import export_script
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError, Unsupported, WorldMismatch
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.launcher.strategy_selection import select_strategies
from unipar.verification.verify import select_multi_rank_strategies

STRATEGY = Strategy("native", "nothing", "dp")
CPU = torch.device("cpu")


def config(**sections: Any) -> Config:
    made = {"device": "cuda", "batch": {"total": 16, "micro": 4}, "train": {"steps": 1}}
    return Config.model_validate(made | {"options": {"native": {"wrapper": "dp"}}} | sections)


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 4)


def test_its_option_makes_the_strategy() -> None:
    """And the strategy sets the option; four ranks' microbatches become those of one process."""
    assert strategies.strategy_of(config()) == STRATEGY
    at = strategies.config_in_strategy(
        config(options={}, parallel={"data": 4}, batch={"micro": 2, "accumulate": 3}), STRATEGY
    )
    assert at.options == {"native": {"wrapper": "dp"}}
    assert at.parallel.data == 1
    assert (at.batch.settle(1).total, at.batch.settle(1).micro, at.batch.settle(1).accumulate) == (24, 2, 12)
    assert checks.check_can_run(at).name == "native"


def test_it_is_one_process() -> None:
    """However many GPUs there are; DDP has a rank for each."""
    assert resources.count_ranks(config()) == RankCount(1, "native/nothing+dp is one process")
    assert resources.count_ranks(config(options={})).number == 4


def test_a_launcher_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for all GPUs would train the same in each."""
    place = Place(rank=0, size=2, local_rank=0, local_size=2, launcher="torchrun")
    monkeypatch.setattr("unipar.launcher.preparation.prepare._foreign_place", lambda source, starts: place)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(WorldMismatch) as e:
        PreparedRun.of(prepare(config(), code="in the script"), overwrite=False)
    assert str(e.value) == ("torchrun started 2 processes, and native/nothing+dp is one process; start it with python")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"device": "cpu"},
         "device: cpu is not available: nn.DataParallel is for CUDA devices; use native/nothing, or single"),
        ({"parallel": {"data": 2}}, "parallel.data: 2 contradicts the strategy: native/nothing+dp is one process"),
        ({"batch": {"total": 16, "micro": 8}},
         "batch: total 16 = micro 8 x accumulate 2 leaves some of 4 GPUs without a microbatch; lower batch.micro, or "
         "say device: cuda:0"),
        ({"train": {"steps": 1, "precision": "bf16-master"}},
         "train.precision: bf16-master is not available: DDP, as nn.DataParallel, keeps one copy of the parameters, so "
         "there is no fp32 master beside bf16 ones; use another shard, or deepspeed/*"),
        ({"train": {"steps": 1, "local_steps": 2}},
         "train.local_steps: 2 is not available: nn.DataParallel is one process"),
        ({"model": {"offload": "parameters"}},
         "model.offload: parameters is not available here, only in deepspeed/optimizer, deepspeed/gradients, "
         "deepspeed/parameters, native/parameters"),
        ({"parallel": {"shard_over": 2}},
         "parallel.shard_over: 2 is not available here, only in native/optimizer, native/gradients, native/parameters"),
        ({"model": {"recompute": "blocks"}},
         "model.recompute: blocks is not available: nn.DataParallel's copies would call the original's forward; "
         "leave it out"),
        ({"model": {"compile": "blocks"}},
         "model.compile is not available: nn.DataParallel's copies would call the original's forward; leave it out"),
        ({"model": {"offload": "activations"}},
         "model.offload: activations is not available: nn.DataParallel's copies would call the original's forward; "
         "leave it out"),
        ({"model": {"sync_batchnorm": True}},
         "model.sync_batchnorm: true has no effect: it works between processes, and this is one; leave it out"),
    ],
)  # fmt: skip
def test_refusals(sections: dict[str, Any], message: str) -> None:
    """In a sentence, before any process starts."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(config(**sections))
    assert str(e.value) == f"native/nothing+dp: {message}"


def test_it_splits_nothing() -> None:
    """There is no such strategy, and the key that contradicts is named."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(config(parallel={"shard": "parameters"}))
    assert str(e.value) == (
        "native/parameters: parallel.shard: parameters is not available: nn.DataParallel splits nothing; leave "
        "options.native.wrapper out"
    )


def test_compare_has_a_row_for_it_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the device is left open."""
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 0)
    row, _ = select_strategies(
        SettledConfig.of(config(device="auto", options={}), Strategy("native"), 2, "cpu"), (str(STRATEGY),)
    )[str(STRATEGY)]
    assert (row.outcome, row.note) == (
        "refused",
        "device: cpu (auto: no GPU visible here) is not available: nn.DataParallel is for CUDA devices; use "
        "native/nothing, or single",
    )


def test_verify_leaves_it_to_compare() -> None:
    """Compare runs it beside the others; verify has nothing to hold to one process."""
    wide = SettledConfig.of(config(options={}), Strategy("native"), 2, "cuda")
    assert select_strategies(wide, (str(STRATEGY),))[str(STRATEGY)][0].outcome == "waits"
    row, _ = select_multi_rank_strategies(wide, (str(STRATEGY),))[str(STRATEGY)]
    assert (row.outcome, row.note) == (
        "refused",
        "it is one process, and verify compares several ranks with one process; `unipar compare` runs it",
    )


@pytest.mark.parametrize(("device", "ids"), [("cuda", [0, 1, 2, 3]), ("auto", [0, 1, 2, 3]), ("cuda:2", [2])])
def test_its_devices(device: str, ids: list[int]) -> None:
    """All that are visible, or the one that is named: explain shows what the library is told."""
    (told,) = explain_config(load_given_config(config(device=device), {})).strategies
    assert (told.strategy, told.note, told.library_settings) == (
        "native/nothing+dp",
        "",
        {"DataParallel": {"device_ids": ids}},
    )


def test_no_script_is_written(tmp_path: Path) -> None:
    """Export has DDP and FSDP2 from here."""
    changes = {"device": "cuda", "parallel.data": 1, "options": {"native": {"wrapper": "dp"}}}
    with pytest.raises(Unsupported) as e:
        export_script(load_given_config(WORDS, changes), "torchrun", tmp_path / "made")
    assert list(tmp_path.iterdir()) == []
    assert str(e.value) == "native/nothing: options.native.wrapper: a script does not carry it; leave it out"


def test_several_parts() -> None:
    """One reaches another through its engine, which stands on the first device."""
    with pytest.raises(TaskError) as e:
        DataParallelEngine(Part("critic", nn.Linear(2, 1), cast("Any", None), ()), config(), cast("World", None))
    assert str(e.value) == (
        "nn.DataParallel trains one model, and model() returned parts by name, which could not reach each other on "
        "its devices: use native/nothing"
    )


# The arithmetic, as far as the CPU goes


def micros(count: int) -> list[Micro]:
    task = Tiny()
    return [Micro(task.collate(task.data()[i : i + 2]), (i + 1) / 10, i) for i in range(count)]


def test_microbatches_are_dealt_over_devices() -> None:
    """A whole one each; the last round may have fewer, and one device needs no rounds."""
    five = micros(5)
    made = group_into_rounds(five, 2)
    assert [m.scale for m in made] == [1.0, 1.0, 1.0]
    assert [list(m.batch.micros) for m in made] == [five[:2], five[2:4], five[4:]]
    assert group_into_rounds(five, 1) is five


def test_the_library_cuts_no_batch() -> None:
    """Each device is given one microbatch as it is, in a holder; a short round leaves devices idle."""
    two = micros(2)

    def loss(model: nn.Module, batch: Any, number: int) -> Any:
        return batch, number

    given_to, words = RoundDataParallel(ForwardCall(nn.Linear(4, 1), CPU)).scatter(
        (loss, OpaqueBatch(MicrobatchRound(two))), {}, [CPU, CPU, CPU]
    )
    assert [f(nn.Identity(), held.batch) for f, held in given_to] == [(two[0].batch, 0), (two[1].batch, 1)]
    assert words == [{}, {}]


def test_losses_are_added_in_fp32() -> None:
    """A tenth of 1 and a fifth of 2; in half precision they are 0.4998."""
    losses = [torch.tensor(1.0, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float16)]
    whole = sum_losses(losses, [Micro(None, 0.1), Micro(None, 0.2)])
    assert whole.dtype == torch.float32
    assert whole.item() == pytest.approx(0.5, abs=1e-6)


class Side(nn.Module):
    """A round on the CPU: microbatches one after another, each through the model itself."""

    def __init__(self, call: ForwardCall) -> None:
        super().__init__()
        self.call = call

    @override
    def forward(self, fn: Any, held: OpaqueBatch) -> Tensor:
        assert isinstance(held.batch, MicrobatchRound)
        return sum_losses([self.call(m.bind(fn), OpaqueBatch(m.batch)) for m in held.batch.micros], held.batch.micros)


def in_rounds_of_two(engine: SingleEngine, fn: LossFn, micros: Sequence[Micro], *more: Any) -> Tensor:
    """Run forward and backward as if the engine had two devices."""
    return WrapperEngine.run_microbatches(engine, fn, group_into_rounds(micros, 2), *more)


@pytest.mark.filterwarnings("ignore")
def test_rounds_give_the_step_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three microbatches in two rounds, under the same random numbers: losses, norms and weights."""
    ends: list[tuple[dict[str, list[float]], Tensor]] = []
    for rounds in (False, True):
        with running(Plain(dropout=0.2), tmp_path, batch={"total": 6, "micro": 2}) as run:
            engine: Any = run.engine
            if rounds:
                monkeypatch.setattr(SingleEngine, "run_microbatches", in_rounds_of_two)
                monkeypatch.setattr(SingleEngine, "forward_loss", DataParallelEngine.forward_loss)
                engine.wrapped = Side(engine.call)
            run.record(3)
            run.task.train(run)
            ends.append((run.recorded_steps(), engine.model.head.weight.detach().clone()))
    (one, weight), (dealt_out, other) = ends
    assert dealt_out["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert dealt_out["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert torch.allclose(other, weight, rtol=0, atol=1e-7)
