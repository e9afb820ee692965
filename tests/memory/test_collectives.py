"""What a step sends: bytes by collective in every kind of strategy, by torch's operators and Horovod's timeline."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.comparisons import write_example_comparison
from tests.support.forks import Forks
from tests.support.watched_strategies import compared
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.backend.offered_strategies import config_in_strategy
from unipar.comparison.library_traffic import with_library_traffic
from unipar.comparison.strategy_world import StrategyWorld
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.distributed.mesh import Mesh
from unipar.memory.account import MemoryAccount, PhasePeak, read_account
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter, axis_of_ranks, collective_of
from unipar.memory.sources.call_sites import CallSiteRecorder
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult
from unipar.task.reference import TaskRef

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar


class Tiny(unipar.Task):
    """Four matrices of 64 x 64: 65,536 bytes; where that is asked for, the step that is recorded fails."""

    def __init__(self, fails=False):
        self.fails = fails

    def train(self, run):
        self.run = run
        super().train(run)

    def model(self):
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def blocks(self, model):
        return ["0", "1", "2", "3"]

    def data(self):
        return TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        if self.fails and (self.run.rank, self.run.done) == (1, RECORDED):
            raise ArithmeticError("of the recorded step")
        return model(batch[0]).square().mean()
'''
SENT: dict[str, dict[str, int]] = {
    "native/nothing": {"all_reduce": 65536},
    "native/optimizer": {"all_reduce": 65536, "broadcast": 65536},
    "native/gradients": {"all_gather": 65536, "reduce_scatter": 65536, "all_reduce": 16},
    "native/parameters": {"all_gather": 131072, "reduce_scatter": 65536, "all_reduce": 16},
    "deepspeed/gradients": {"all_reduce": 65540, "all_gather": 65536},
    "horovod/nothing": {"all_reduce": 65536},
}
"""FSDP2 gathers once more for the backward where parameters are split; 16 and 4 bytes are norms."""


ALONG_AXES = """
import json, os, sys
from collections import Counter
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from unipar.distributed.mesh import Mesh, MeshGroups
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter

class AddedUpInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=groups.group("tensor"))
        return gradient

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = Mesh.of(rank, 4, tensor=2, pipeline=2)
groups = MeshGroups(mesh, "cpu")
tensor, pipeline, data = (groups.group(axis) for axis in ("tensor", "pipeline", "data"))
both = mesh.rank_at(pipeline=1 - mesh.seat["pipeline"])
first, x, weights = mesh.seat["pipeline"] == 0, torch.ones(8), torch.ones(3, requires_grad=True)
traffic = Counter()
with CollectiveCounter(traffic, mesh):
    AddedUpInBackward.apply(weights * 2).sum().backward()
    (dist.isend(x, both, group=pipeline) if first else dist.irecv(x, both, group=pipeline)).wait()
    if first:
        dist.send(torch.ones(2), both)
    else:
        dist.recv(torch.ones(2), both)
    swap = [dist.P2POp(dist.isend, torch.ones(16), both, pipeline)]
    swap += [dist.P2POp(dist.irecv, torch.ones(16), both, pipeline)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    functional.wait_tensor(functional.all_gather_tensor(torch.ones(4), 0, tensor))
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", data))
    dist.all_reduce(torch.ones(5), group=data)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
print(json.dumps([rank, sorted([*key, size] for key, size in traffic.items())]), flush=True)
dist.barrier()
os._exit(0)
"""


def test_bytes_by_axis(tmp_path: Path, forks: Forks) -> None:
    """2 stages of 2 ranks: calls in a backward, between two ranks, in DTensor's way; a group of one sends nothing."""
    (tmp_path / "along.py").write_text(ALONG_AXES, encoding="utf-8")
    every = [["all ranks", "all_reduce", 4], ["tensor", "all_gather", 32], ["tensor", "all_reduce", 12]]
    first_stage = [*every[:1], ["all ranks", "send", 8], ["pipeline", "send", 64 + 32], *every[1:]]
    last_stage = [*every[:1], ["pipeline", "send", 64], *every[1:]]
    printed = [json.loads(done.stdout) for done in forks.ranks(("along.py",), tmp_path, size=4)]
    assert printed == [[0, first_stage], [1, first_stage], [2, last_stage], [3, last_stage]]


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [
        ([5], None),
        ([4, 5], "tensor"),
        ([1, 3], "context"),
        ([0, 4], "data"),
        ([0, 2, 4, 6], "data x context"),
        (list(range(8)), "all ranks"),
    ],
)
def test_axes_of_groups(ranks: list[int], axis: str | None) -> None:
    """A mesh of 2 x 2 x 2 ranks: groups along one axis, along two, and of all."""
    assert axis_of_ranks(Mesh.of(0, 8, tensor=2, context=2), ranks) == axis


def test_a_world_with_one_axis_has_no_other_name() -> None:
    """All ranks are those of the data."""
    assert axis_of_ranks(Mesh.of(1, 2), [0, 1]) == "data"
    assert axis_of_ranks(Mesh.of(1, 2, pipeline=2), [0, 1]) == "pipeline"
    assert axis_of_ranks(Mesh.of(1, 4, context=2), [0, 1, 2, 3]) == "data x context"


NO_HOROVOD = registry.why_not_installed(registry.find_backend("horovod"))
needs_horovod = pytest.mark.skipif(bool(NO_HOROVOD), reason=NO_HOROVOD or "")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sent")
    (folder / "tiny.py").write_text(TASK.replace("RECORDED", "1"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        played = [strategy for strategy in SENT if not (NO_HOROVOD and strategy == "horovod/nothing")]
        strategies = compared(folder, *played, forks=forks, task={"use": "tiny.py:Tiny"}, model={})
    if NO_HOROVOD:
        return strategies
    (run,) = {file.parent for file in folder.rglob("horovod-nothing/rank-0.memory.json")}
    return strategies | {"on the page": [read_account(run, rank) for rank in (0, 1)]}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(strategy, marks=needs_horovod if strategy == "horovod/nothing" else ()) for strategy in SENT],
)
def test_bytes_by_collective(found: dict[str, Any], strategy: str) -> None:
    """To the byte, on both ranks."""
    assert [account["sent"] for account in found[strategy]["memory"]] == [SENT[strategy], SENT[strategy]]
    assert [account["sent_along"] for account in found[strategy]["memory"]] == [{"data": SENT[strategy]}] * 2


@needs_horovod
def test_the_page_has_what_a_world_of_its_own_told(found: dict[str, Any]) -> None:
    """The page reads what the ranks wrote down."""
    assert [account.sent for account in found["on the page"]] == [SENT["horovod/nothing"], SENT["horovod/nothing"]]


@needs_horovod
def test_the_method_is_stated(found: dict[str, Any]) -> None:
    """Horovod's collectives are its own, and only its timeline knows of them."""
    by = {strategy: found[strategy]["memory"][1]["sent_by"] for strategy in ("native/nothing", "horovod/nothing")}
    assert by == {
        "native/nothing": "each call of torch.distributed's operators",
        "horovod/nothing": "each call of torch.distributed's operators, and Horovod's timeline",
    }


@pytest.mark.parametrize(
    ("task", "said"),
    [({"use": "tiny.py:Gone"}, "Gone"), ({"use": "tiny.py:Tiny", "args": {"fails": True}}, "of the recorded step")],
    ids=["no such task", "one rank fails while the other waits for it"],
)
@pytest.mark.usefixtures("forked")
@needs_horovod
def test_a_timeline_that_cannot_be_had_is_a_note(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    """The world of its own fails, with its sentence; what was known before is kept."""
    task = task | {"use": f"{tmp_path}/{task['use']}"}
    told = {"task": task, "parallel": {"data": 2}, "device": "cpu", "model": {"blocks": "none"}}
    strategy = Strategy.parse("horovod/nothing")
    config = config_in_strategy(
        load_given_config(told | {"batch": {"total": 2}, "train": {"steps": 4}}, None).config, strategy
    )
    (tmp_path / "tiny.py").write_text(TASK.replace("RECORDED", "1"), encoding="utf-8")
    run = StrategyWorld(settle(config, 2), TaskRef.of(None, config.task, {}), tmp_path / "run")
    before = [
        MemoryAccount(rank=r, method="m", device="cpu", base=1, phases=(), peaks=(), sent={"x": 3}) for r in (0, 1)
    ]
    after = with_library_traffic(run, before, "1")
    assert [account.sent for account in after] == [{"x": 3}, {"x": 3}]
    for account in after:
        (note,) = account.notes
        assert note.startswith("its communication is incomplete: Horovod's timeline could not be read (")
        assert said in note


def test_one_process_sends_nothing(found: dict[str, Any]) -> None:
    """There is nobody to send to."""
    assert [account["sent"] for account in found["single"]["memory"]] == [{}]


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("c10d::reduce_", "reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("_c10d_functional::all_reduce", "all_reduce"),
        ("_c10d_functional::all_gather_into_tensor", "all_gather"),
        ("_c10d_functional::wait_tensor", None),
        ("c10d::barrier", None),
        ("c10d::recv_", None),
        ("aten::scatter", None),
    ],
)
def test_operators_and_what_they_are_called(operator: str, kind: str | None) -> None:
    """A barrier carries nothing, what is received was sent by another, and aten's scatter stays here."""
    assert collective_of(operator) == kind


@needs_horovod
def test_a_timeline_is_read() -> None:
    """Sizes come at a collective's end; phases inside it and before it have none, and our own beginning is left out."""
    from unipar_horovod.bytes_from_timeline import MARKER_TENSOR, bytes_by_collective

    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.model.0.weight"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": f"allreduce.{MARKER_TENSOR}"}},
        {"ph": "E", "ts": 1, "pid": 1},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1, "pid": 1},
        {"ph": "E", "ts": 2, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 3, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 3, "pid": 2},
        {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 4, "pid": 1},
        {"ph": "E", "ts": 5, "pid": 1},
        {"ph": "E", "ts": 6, "pid": 1, "args": {"dtype": "float16", "shape": "[3, 5]"}},
        {"ph": "E", "ts": 6, "pid": 2, "args": {"dtype": "float32", "shape": "[1]"}},
        {"ph": "B", "name": "ALLGATHER", "ts": 7, "pid": 1},
        {"ph": "E", "ts": 8, "pid": 1, "args": {"dtype": "float64", "shape": "[]"}},
    ]
    assert bytes_by_collective(events) == {"all_reduce": 30, "all_gather": 8}


def sending(rank: int, along: dict[str, dict[str, int]]) -> MemoryAccount:
    peak = PhasePeak(name="update", peak=2**20, held={"parameters": 2**20})
    sent = Counter[str]()
    for by_collective in along.values():
        sent.update(by_collective)
    given: dict[str, Any] = {"sent": dict(sent), "sent_along": along, "sent_by": "calls"}
    return MemoryAccount(rank=rank, method="m", device="cpu", base=1, phases=(peak,), peaks=(2**20,), **given)


def hybrid() -> Comparison:
    """Strategies of two ranks each, of which the last has two stages that send other things."""
    plain = [sending(rank, {"data": {"all_reduce": 3 * 2**20}}) for rank in (0, 1)]
    stages = [
        sending(0, {"pipeline": {"send": 2**20}, "all ranks": {"all_reduce": 8}}),
        sending(1, {"pipeline": {"send": 2**19, "all_reduce": 2**18}, "all ranks": {"all_reduce": 8}}),
    ]
    rows = [
        StrategyResult(
            strategy=strategy, outcome="ran", losses=[1.0], seconds=[[0.1]], memory=memory, peak_rss=[1] * len(memory)
        )
        for strategy, memory in {
            "single": [sending(0, {})],
            "native/nothing": plain,
            "native/nothing+pipeline2": stages,
        }.items()
    ]
    return Comparison(name="x", out="x", precision="fp32", warmup=1, samples=8, ranks=2, rows=rows)


def test_the_table_shows_bytes_by_axis() -> None:
    """Each axis has a column; on each the rank counts that sends most along it."""
    lines = hybrid().tables(80)[2]
    at = next(i for i, line in enumerate(lines) if line.startswith("sent "))
    assert lines[at:] == [
        "sent                         data  pipeline  all ranks",
        "native/nothing            3.0 MiB         -          -",
        "native/nothing+pipeline2        -   1.0 MiB        8 B",
    ]
    assert "\nsent: bytes of one step by axis of the mesh" in hybrid().table(80)


def test_a_peak_of_the_set_up_is_said_to_be_that() -> None:
    """Rank 0 tries the whole model before it is split, once; the steps need less."""
    built = PhasePeak(name="built", peak=9 * 2**20, held={})
    step = PhasePeak(name="backward", peak=3 * 2**20, held={})
    rows = hybrid().rows
    memory = [account.model_copy(update={"phases": (step, built)[: 2 - account.rank]}) for account in rows[2].memory]
    found = hybrid().changed(rows=[*rows[:2], rows[2].changed(memory=memory)])
    said = (
        "native/nothing+pipeline2: its peak is of the set-up, in which rank 0 tries the whole model; in the steps the "
        "largest rank holds 3.0 MiB"
    )
    assert said in found.remarks()
    assert not [line for line in hybrid().remarks() if "set-up" in line]


def test_without_axes_the_table_is_as_before() -> None:
    """All that plain strategies send goes along the data."""
    plain = hybrid().changed(rows=hybrid().rows[:2])
    assert not [line for line in plain.table(80).splitlines() if line.startswith("sent")]


def test_the_page_shows_what_each_rank_sends_along_each_axis(tmp_path: Path) -> None:
    """Ranks that send the same share a row."""
    (tmp_path / "compare.json").write_text(json.dumps(hybrid().model_dump(mode="json")), encoding="utf-8")
    text = render_comparison(ComparisonPageData.read(tmp_path))
    table = text[text.index("by axis of the mesh</caption>") :].partition("</table>")[0]
    rows = [re.sub("<[^>]*>", "|", row).strip("|") for row in table.splitlines()[1:-1]]
    assert [re.split(r"\|+", row) for row in rows] == [
        ["native/nothing", "all", "3.0 MiB", "–", "–"],
        ["native/nothing+pipeline2", "0", "–", "1.0 MiB", "8 B"],
        ["native/nothing+pipeline2", "1", "–", "768 KiB", "8 B"],
    ]


def test_accounts_of_earlier_versions_have_no_axes(tmp_path: Path) -> None:
    """Their files are read, and the page shows their bytes by collective."""
    old = sending(0, {"data": {"all_reduce": 7}}).model_dump(mode="json")
    del old["sent_along"], old["sent_across"]
    (tmp_path / "rank-0.memory.json").write_text(json.dumps(old), encoding="utf-8")
    assert (read_account(tmp_path, 0).sent, read_account(tmp_path, 0).sent_along) == ({"all_reduce": 7}, {})
    assert read_account(tmp_path, 0).sent_across == 0


def test_the_page_shows_it_with_the_method(tmp_path: Path) -> None:
    """A column a collective, strategies that one method saw together."""
    text = render_comparison(ComparisonPageData.read(write_example_comparison(tmp_path / "run")))
    sent = text[text.index("What a step sends") :].partition("</section>")[0]
    assert '<th scope="col">all_reduce</th>' in sent
    assert "horovod/nothing, deepspeed/gradients+library: by records of a profiler." in sent
    assert "single:" not in sent


def test_compiled_code_runs_under_what_records() -> None:
    """Recording a step of a compiled model records what was compiled, and compiles nothing."""
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append("compiled")

        def run(*args: Any) -> Any:
            ran.append("ran")
            return graph(*args)

        return run

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double: Any = torch.compile(doubled, backend=backend)
    x = torch.ones(2)
    try:
        double(x)
        with CallSiteRecorder(lambda: 0, [], {}), CollectiveCounter(Counter(), Mesh.of(0, 1)):
            assert double(x).tolist() == [2.0, 2.0]
    finally:
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    assert ran == ["compiled", "ran", "ran"]
