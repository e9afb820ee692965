"""Inside a world: many cases, one after another, each with a new engine; results go to the run folder."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from tests.conformance import tasks
from tests.conformance.cases import BITS, CASES, EVERYWHERE, Case, blocks_for, experts_for
from tests.conformance.generation import Generating
from unipar.backend import Piece, Read, Region, registry
from unipar.backend.checks import settle
from unipar.config import Config, Strategy
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.distributed.world_machines import WorldMachines
from unipar.errors import UniparError
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.tracking.writer import TrackerWriter
from unipar.training.setup import build_run
from unipar.training.training_run import TrainingRun


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Plays the cases named in RUN/cases.json in the strategy named there."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    told = json.loads((folder / "cases.json").read_text("utf-8"))
    strategy, names = Strategy.parse(told["strategy"]), told["cases"]
    tasks.BLOCKS[0], tasks.EXPERTS[0] = blocks_for(strategy), experts_for(strategy)
    first = CASES[names[0] if CASES[names[0]].apart else "one microbatch"].config(strategy, told["size"])
    world = registry.find_backend(strategy.backend).join(first, place)
    heartbeat = HeartbeatWriter(heartbeat_path(folder, place.rank))
    for name in names:
        began = time.perf_counter()
        result = run_case_or_error(CASES[name], strategy, world, folder, heartbeat)
        result["seconds"] = time.perf_counter() - began
        torch.save(result, folder / f"{names.index(name)}-{place.rank}.pt")
        world.barrier()
    (folder / f"listens-{place.rank}.json").write_text(json.dumps(_listening_addresses()), "utf-8")
    world.barrier()
    world.close()


def _listening_addresses() -> list[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found: list[str] = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text("utf-8").splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.append(words[1].partition(":")[0])
    return found


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def run_case_or_error(
    case: Case, strategy: Strategy, world: World, folder: Path, heartbeat: HeartbeatWriter
) -> dict[str, Any]:
    try:
        return _run_case(case, strategy, world, folder, heartbeat)
    except UniparError as e:
        return {"error": type(e).__name__, "message": str(e)}
    except Exception as e:
        if case.apart:
            raise
        return {"error": type(e).__name__, "message": "".join(traceback.format_exception(e))}


def _run_case(case: Case, strategy: Strategy, world: World, folder: Path, heartbeat: HeartbeatWriter) -> dict[str, Any]:
    config = case.config(strategy, world.size)
    settled, backend = settle(config, world.size), registry.find_backend(strategy.backend)
    machines = case.machines or "a" * world.size
    world.machines = WorldMachines.of_ranks(machines, machines, [""] * world.size)
    with RunLog(run_log_path(folder, world.rank)) as run_log:
        trackers = TrackerWriter((), folder, world.rank)
        counts = case.name in (
            *BITS,
            *EVERYWHERE,
        )  # every strategy has a case in which operations are counted, as in runs
        writes: dict[str, Any] = {"run_log": run_log, "heartbeat": heartbeat, "trackers": trackers, "counts": counts}
        made = build_run(settled, backend, case.task(), world, **writes)
        made.record(made.steps)
        kept: dict[str, Any] = {"loss": []}

        by_hand = AveragesByHand(config)

        def hop(done: int) -> None:
            by_hand.add(made)
            if done == case.hop:
                counters = {name: part.engine.counters() for name, part in made.parts.items()}
                state = _gather_pieces(made.pieces())
                kept.update(made.recorded_steps())
                _close(made)
                new = build_run(settled, backend, case.task(), world, **writes)
                new.restore(state)
                for name, part in new.parts.items():
                    part.engine.restore_counters(counters[name])
                for part, other in zip(made.parts.values(), new.parts.values(), strict=True):
                    part.module, part.engine = other.module, other.engine
                vars(made)["_evaluation"] = None  # it keeps the engines that it evaluates

        made.at_boundary(hop)
        made.task.train(made)
        made.finish()
        now = made.recorded_steps()
        pieces = [(p.name, p.kind, p.shape, tuple(p.where), p.tensor.detach().flatten().clone()) for p in made.pieces()]
        unequal = by_hand.unequal(made)
        _close(made)
    told = ("event", "time", "step")
    evals = [{k: v for k, v in row.items() if k not in told} for row in _evals(folder, world.rank)]
    if isinstance(made.task, Generating):
        evals = [made.task.found]
    assert kept["loss"] == now["loss"][: len(kept["loss"])]
    run_log_path(folder, world.rank).unlink()
    parts = {name: row["loss"] for name, row in now.get("parts", {}).items()}
    result = {"loss": now["loss"], "norm": now["norm"], "parts": parts, "pieces": pieces, "evals": evals}
    return result | {"unequal averages": unequal}


class AveragesByHand:
    """Averages in one process: of whole weights, as all ranks together have them after each step."""

    def __init__(self, config: Config) -> None:
        self._ema = config.train.ema
        self._steps: dict[str, int] = {}
        self._averages: dict[str, Tensor] = {}

    def add(self, made: TrainingRun) -> None:
        """Update the averages of the parts that have taken a step; before the first step, begin as the weights are."""
        if self._ema is None:
            return
        state = _gather_pieces(made.pieces())
        weights = {n: t for (n, kind), t in state.whole.items() if kind == "weight" and state.has(n, "average")}
        for part, trained in made.parts.items():
            prefix = f"{part}." if len(made.parts) > 1 else ""
            mine = {n: t for n, t in weights.items() if n.startswith(prefix)}
            steps = self._steps.setdefault(part, -1)
            if steps < 0:
                self._averages |= {n: t.clone() for n, t in mine.items()}
                self._steps[part] = 0
                continue
            now = self._steps[part] = int(trained.engine.counters()["ema steps"])
            if now > steps and now % self._ema.every == 0:
                k = now // self._ema.every
                decay = min(self._ema.decay, k / (k + self._ema.warmup))
                before = self._averages
                self._averages = before | {n: before[n] + (1 - decay) * (t - before[n]) for n, t in mine.items()}

    def unequal(self, made: TrainingRun) -> list[str]:
        """Return the names of the run's averages that are not these, bit for bit; names in one of both alone, too."""
        if self._ema is None:
            return sorted(piece.name for piece in made.pieces() if piece.kind == "average")
        found = {n: t for (n, kind), t in _gather_pieces(made.pieces()).whole.items() if kind == "average"}
        missing = sorted(found.keys() ^ self._averages.keys())
        return missing + [n for n, t in self._averages.items() if n in found and not torch.equal(t, found[n])]


def _close(made: TrainingRun) -> None:
    for part in made.parts.values():
        part.engine.close()


def _evals(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [row for row in RunLog.read(run_log_path(folder, rank)) if row["event"] == "eval"]


Whole = dict[tuple[str, str], Tensor]


def _gather_pieces(pieces: Any) -> CombinedState:
    """All pieces of all ranks on every rank."""
    mine = [(p.name, p.kind, p.shape, tuple(p.where), p.tensor.detach().flatten().clone()) for p in _listed(pieces)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    every = [p for rank in ranks for p in rank]
    return CombinedState(combine_pieces(every), {(name, kind): tuple(shape) for name, kind, shape, *_ in every})


def _listed(pieces: Any) -> list[Piece]:
    return list(pieces)


def combine_pieces(pieces: list[Any]) -> Whole:
    """Every element of every tensor exactly once: no gap, no overlap."""
    whole: Whole = {}
    count: dict[tuple[str, str], Tensor] = {}
    for name, kind, shape, numbers, tensor in pieces:
        where = Region(*numbers)
        size = int(torch.Size(shape).numel())
        if (name, kind) not in whole:
            whole[name, kind] = torch.zeros(size, dtype=tensor.dtype)
            count[name, kind] = torch.zeros(size, dtype=torch.int64)
        where.of(whole[name, kind]).copy_(tensor.view(where.runs, where.length))
        where.of(count[name, kind]).add_(1)
    uneven = {key: t.unique().tolist() for key, t in count.items() if (t != 1).any()}
    assert not uneven, f"pieces overlap or leave gaps: {uneven}"
    return whole


class CombinedState(Read):
    """A `Read` over pieces put together."""

    def __init__(self, whole: Whole, shapes: dict[tuple[str, str], tuple[int, ...]]) -> None:
        self.whole, self.shapes = whole, shapes

    @override
    def __call__(self, name: str, kind: str, where: Region) -> Tensor:
        return where.of(self.whole[name, kind])

    @override
    def kinds(self, name: str) -> set[str]:
        return {k for n, k in self.whole if n == name and k not in ("buffer", "average")}

    @override
    def has(self, name: str, kind: str) -> bool:
        return (name, kind) in self.whole

    @override
    def shape(self, name: str, kind: str) -> tuple[int, ...]:
        return self.shapes[name, kind]
