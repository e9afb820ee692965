"""Native's own engines on one rank of any world, in a process group that only pretends, beside what is planned."""

from __future__ import annotations

import json
import socket
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support import library_shapes
from tests.support.pretended_ranks import Mark, PretendedRanks, SeenSpan, StepSpans
from unipar.backend import Engine, Micro, Part, registry
from unipar.backend import offered_strategies as strategies
from unipar.backend.torch_libraries import uses_ddp
from unipar.config import Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.averages.engine import with_averages
from unipar.engines.update_guard import UpdateGuard
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter, Traffic
from unipar.memory.recording.held_bytes import find_storages
from unipar.model.parameter_groups import OptimizerFactory, parameter_groups
from unipar.planning.activations import Activations
from unipar.prediction.bytes_sent import shares_of_ranks
from unipar.prediction.timeline import Prediction, StepTimeline
from unipar.prediction.torch_engines import fullest_rank

MICRO = 2
SCALARS = 32
"""Most bytes of the numbers that an engine makes of a loss, which are not planned; every parameter has more."""


@dataclass(frozen=True)
class Case:
    """One model on one number of ranks."""

    seed: int
    strategy: str
    ranks: int
    microbatches: int = 1
    precision: str = "fp32"
    blocks: str = "auto"
    decay: str = "matrices"
    shard_over: int | None = None
    staged: bool = False
    """True: on the CPU, where gloo copies what it gathers and scatters."""

    wide: int = 1
    """Factor of all widths."""

    options: dict[str, Any] | None = None
    ema: bool = False

    @property
    def config(self) -> Config:
        """Config of the case."""
        given: dict[str, Any] = {
            "task": {"use": f"{library_shapes.__file__}:LibraryShapes", "args": {"seed": self.seed, "wide": self.wide}},
            "device": "cpu",
            "parallel": {"data": self.ranks, "shard_over": self.shard_over},
            "batch": {"total": self.ranks * MICRO * self.microbatches, "micro": MICRO},
            "model": {"blocks": self.blocks},
            "train": {
                "steps": 3,
                "precision": self.precision,
                "optimizer": {"decay": self.decay},
                "ema": {} if self.ema else None,
            },
            "options": {"native": self.options or {}},
        }
        return strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(self.strategy))


@dataclass(frozen=True)
class Found:
    """What a rank holds and sends in a steady step."""

    held: Mapping[str, Mapping[str, int]]
    """Bytes by category as a phase begins."""

    sent: Mapping[str, list[int]]
    """Bytes and calls by collective."""

    spans: Sequence[SeenSpan]
    owners: Sequence[Sequence[str]] | None
    """Names of the parameters of which each rank has the optimizer's state, where that is split by parameters."""


def _take_each_update(*_: object) -> bool:
    return False


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Write what is not as planned in each case of cases.json into compared.json."""
    setattr(UpdateGuard, "leaves_out", _take_each_update)  # noqa: B010 - norms of values that did not come may be NaN
    warnings.filterwarnings("ignore")
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text("utf-8"))]
    (folder / "compared.json").write_text(json.dumps([list(compare(case)) for case in cases]), "utf-8")


def compare(case: Case) -> Iterator[str]:
    """Yield a sentence for each number of bytes or calls that is not the planned one."""
    traced = _traced(case.seed, case.wide, case.precision, case.blocks, case.decay, ema=case.ema)
    timeline: StepTimeline = replace(traced.timeline, microbatches=case.microbatches)
    device = "cpu" if case.staged else "cuda"
    prediction = registry.find_backend("native").predict(case.config, timeline, case.ranks, device=device)
    owners, rank = None, 0
    if case.strategy == "native/optimizer" and uses_ddp(case.config):
        owners = [sorted(p.name for p in share) for share in shares_of_ranks(timeline, case.ranks)]
        rank = fullest_rank(timeline, case.ranks)
    found = _train(case, timeline.blocks, rank)
    if owners != found.owners:
        yield f"planned the states of {owners}, found {found.owners}"
    sent = {volume.collective: [0, 0] for volume in prediction.sent}
    for volume in prediction.sent:
        size, calls = sent[volume.collective]
        sent[volume.collective] = [size + volume.size, calls + volume.calls]
    if sent != found.sent:
        yield f"planned to send {sent}, sent {dict(found.sent)}"
    for phase in ("update", "steady"):
        planned = _planned_at(timeline.at(phase), prediction)
        if planned != found.held[phase]:
            yield f"{phase}: planned to hold {planned}, held {dict(found.held[phase])}"
    activations = traced.activations if case.staged else traced.activations.without_copies
    yield from _compare_spans(timeline, prediction, activations, found, is_rounded=case.precision == "bf16-master")


@cache
def _traced(seed: int, wide: int, precision: str, blocks: str, decay: str, *, ema: bool) -> Any:
    from unipar.training.fake_run.trace_task import trace_task

    return trace_task(Case(seed, "native/nothing", 1, 1, precision, blocks, decay, wide=wide, ema=ema).config, MICRO)


def _planned_at(at: int, prediction: Prediction) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for term in prediction.terms:
        late = term.name.endswith(", filled with zeros")  # made when the update has begun
        if term.first <= at and (term.until is None or term.until > at) and not late:
            sums[term.category] += term.size
    return {category: size for category, size in sums.items() if size}


def _compare_spans(
    timeline: StepTimeline, prediction: Prediction, activations: Activations, found: Found, *, is_rounded: bool
) -> Iterator[str]:
    """Yield a sentence for each span between two moments whose peak is not the planned one.

    Where a library acts between them, what it frees first is no part of the peak.
    """
    levels = activations.levels(MICRO)
    ticks = [tick for tick, _ in activations.moments]
    held = np.array([sum(_planned_at(at, prediction).values()) for at in range(len(ticks))])
    peaks, begins = held + np.maximum.reduceat(levels, ticks), held + levels[ticks]
    base = sum(found.held["base"].values())
    places: dict[Mark, int] = {}
    for at, moment in enumerate(timeline.moments):
        if moment.what in ("begin", "reach", "enter", "finish", "leave"):
            places.setdefault(Mark(moment.phase, moment.what, moment.block), at)
    places.pop(Mark("backward", "reach"), None)
    places.pop(Mark("backward", "enter"), None)
    seen = [span.mark for span in found.spans]
    if sorted(places, key=places.__getitem__) != seen:
        yield f"planned the moments {sorted(places, key=places.__getitem__)}, saw {seen}"
        return
    for span, behind in zip(found.spans, seen[1:], strict=False):
        if span.mark.phase == "update":
            return  # what the norm needs is not planned
        at, end = places[span.mark], places[behind]
        planned, most = int(max(peaks[at:end])), span.most
        if span.mark.what in ("reach", "finish"):
            before = int(held[at - 1] + levels[ticks[at]])
            if not 0 <= base + span.first - before <= SCALARS:
                yield f"before {' '.join(map(str, span.mark))}: planned {before}, held {base + span.first}"
            planned, most = max(planned, int(begins[end])), span.allocated
        elif is_rounded and behind != ("forward", "reach", 0):
            continue  # kernels of bf16 have temporaries of their own on the CPU
        if most is not None and not 0 <= base + most - planned <= SCALARS:
            yield f"{' '.join(map(str, span.mark))}: planned {planned}, held {base + most}"


def _train(case: Case, blocks: Sequence[str], rank: int) -> Found:
    """Return what the fifth step does: before it come the first states, and DDP's buckets are built twice."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=case.ranks, store=FakeStore())
    place = Place(rank=rank, size=case.ranks, local_rank=0, local_size=case.ranks, launcher="unipar")
    world, config = World(place, torch.device("cpu"), None), case.config
    task = library_shapes.LibraryShapes(case.seed, case.wide)
    model = task.model()
    groups = parameter_groups(model, config, task_groups=None, own_optimizer=False)
    factory = OptimizerFactory(groups, config, world.device, own=None)
    inner: Any = registry.find_backend("native").build(Part("model", model, factory, blocks), config, world)
    engine = with_averages(inner, config.train.ema)
    spans = StepSpans(inner.call, [model.get_submodule(name) for name in blocks])
    micros = [Micro(tuple(t[:MICRO] for t in task.data().tensors), 1.0)] * case.microbatches
    held: dict[str, dict[str, int]] = {}
    traffic, counter = Traffic(), CollectiveCounter(Traffic(), world.mesh)

    def loss(model: Any, batch: Any, number: int) -> torch.Tensor:
        return task.loss(model, batch)

    def mark(phase: str) -> None:
        spans.mark(phase)
        held[phase] = _held(engine)

    with PretendedRanks(staged=case.staged):
        for _ in range(3):
            engine.step(loss, micros, 1.0, spans.mark)
        with CollectiveCounter(traffic, world.mesh) as counter:
            engine.step(loss, micros, 1.0, mark)
        held["base"] = held["steady"] = _held(engine)
        with spans.record() as seen:
            engine.step(loss, micros, 1.0, spans.mark)
    owners = None
    if isinstance(inner.optimizer, ZeroRedundancyOptimizer):
        names = {id(p): name for name, p in model.named_parameters()}
        optimizer: Any = inner.optimizer
        shares = optimizer._partition_parameters()
        owners = [sorted(names[id(p)] for group in share for p in group["params"]) for share in shares]
    world.close_without_peers()
    sent = {kind: [traffic["data", kind], calls] for (_, kind), calls in counter.calls.items()}
    return Found(held, sent, seen, owners)


def _held(engine: Engine) -> dict[str, int]:
    """Return the bytes that an engine holds, by category, without the optimizer's counts of steps."""
    storages: dict[int, tuple[str, int]] = {}
    for holding in engine.holdings():
        for storage in find_storages(holding.tensor):
            if storage.nbytes() and not holding.name.endswith(".step"):
                storages.setdefault(storage.data_ptr(), (holding.category, storage.nbytes()))
    sums: Counter[str] = Counter()
    for category, size in storages.values():
        sums[category] += size
    return dict(sums)
