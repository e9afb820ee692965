"""CPU time of tensor and pipeline parallelism beside scripts written by hand: `python -m benchmarks.mesh_time`."""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from unipar_mesh.engine import MeshEngine

from benchmarks.loops import CLIP, DECAY, LR
from benchmarks.mesh_by_hand import pipeline_loop, tensor_loop
from benchmarks.timing import Loop, count_calls, interleaved, interval
from benchmarks.worlds import read_asked, run_world, write_found
from examples.char_gpt import CharGPT
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.training.setup import open_run
from unipar.utils.table import format_table

WAYS: dict[str, tuple[dict[str, Any], Callable[[Any, Any], Loop]]] = {
    "tensor 2": ({"tensor": 2}, tensor_loop),
    "pipeline 2, 1f1b": ({"pipeline": 2, "schedule": "1f1b"}, partial(pipeline_loop, schedule="1f1b")),
    "pipeline 2, gpipe": ({"pipeline": 2, "schedule": "gpipe"}, partial(pipeline_loop, schedule="gpipe")),
}
"""Ways to split the model over two ranks: keys of `parallel`, and the script written by hand."""

SIZES = {"layers": 4, "width": 256, "heads": 4, "context": 128}
MICRO, MICROS = 2, 4
ROUNDS, STEPS, WARM, END = 24, 1, 3, 1_000_000
LIMIT = 1.05
"""Largest ratio of CPU time to the script written by hand."""

DIFFERENCE = 1e-5
"""Largest difference of a parameter from that of the script, after the first steps."""


class EvenStages(CharGPT):
    """Task of the character GPT, cut into stages in the middle, as the script has it."""

    def cuts(self, stages: int) -> list[str]:  # pyright: ignore[reportImplicitOverride] - the base is an example
        return [f"layers.{self.sizes[0] // 2}"]


def config_of(parallel: dict[str, Any]) -> Config:
    """Return the config of a way to split: four microbatches in a step, nothing logged."""
    return Config.model_validate(
        {
            "backend": "native",
            "device": "cpu",
            "parallel": {"data": 1, **parallel},
            "batch": {"micro": MICRO, "accumulate": MICROS},
            "train": {
                "steps": END,
                "clip": CLIP,
                "optimizer": {"name": "adamw", "lr": LR, "weight_decay": DECAY, "decay": "all"},
                "schedule": {"name": "constant"},
            },
            "log": {"every": END},
        }
    )


def measure(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure the CPU time of both ranks in unipar's loop, in the script and in the script again; entry of workers."""
    asked = read_asked(run)
    parallel, script = WAYS[asked["way"]]
    config, task = config_of(parallel), EvenStages(**asked["sizes"])
    with open_run(settle(config, place.size), registry.find_backend("native"), task, place, run) as live:
        local_batch = next(live.batches())
        micros = [micro.batch for micro in local_batch.micros]

        def by_hand() -> tuple[Any, Loop]:
            torch.manual_seed(config.train.seed)
            model: Any = task.model()
            return model, script(model, micros)

        def ours() -> None:
            before = live.done
            live.step(local_batch)
            live.seek(before)

        (model, hand), (_, again) = by_hand(), by_hand()
        loops = {"unipar": ours, "by hand": hand, "by hand, again": again}
        for loop in loops.values():
            for _ in range(WARM):
                loop()
        (part,) = live.parts.values()
        assert isinstance(part.engine, MeshEngine)
        compare_parameters(dict(part.engine.kept), dict(model.named_parameters()))
        dist.barrier()
        times = interleaved(loops, asked["rounds"], STEPS)
        calls = {name: count_calls(loop) for name, loop in loops.items()}
        everything: list[Any] = [None] * place.size
        dist.all_gather_object(everything, {"times": times, "calls": calls})
    if place.rank == 0:
        write_found(run, everything)


def compare_parameters(ours: Mapping[str, Tensor], hand: Mapping[str, Tensor]) -> None:
    """Raise AssertionError unless both have trained the same part of the model to the same values."""
    assert set(ours) == set(hand), sorted(set(ours) ^ set(hand))
    for name, p in ours.items():
        difference = (p - hand[name]).abs().max().item()
        assert difference < DIFFERENCE, f"{name} is off by {difference:.1e}"


def benchmark_mesh(ways: Sequence[str] = tuple(WAYS), rounds: int = ROUNDS) -> tuple[dict[str, Any], bool]:
    """Measure the ratio of both ranks' CPU time to that of the script, in interleaved steps."""
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    good = True
    for way in ways:
        told = measure_way(way, rounds)
        names = ("unipar", "by hand", "by hand, again")
        mine, base, again = ([sum(t) for t in zip(*(each["times"][n] for each in told), strict=True)] for n in names)
        ratios = {
            "unipar": interval([a / b for a, b in zip(mine, base, strict=True)]),
            "by hand, again": interval([a / b for a, b in zip(again, base, strict=True)]),
        }
        found[way] = {name: asdict(r) for name, r in ratios.items()}
        good = good and ratios["unipar"].middle <= LIMIT
        shown = (f"{r.middle:.3f} [{r.low:.3f}..{r.high:.3f}]" for r in ratios.values())
        calls = (" + ".join(f"{t['calls'][name]:.0f}" for t in told) for name in ("unipar", "by hand"))
        rows.append((way, f"{statistics.median(base) * 1e3:.0f}", *shown, *calls))
    header = ("two ranks, GPT", "CPU ms by hand", "unipar / by hand", "the script again", "calls", "by hand")
    print(format_table(header, rows, right=(1,)))
    print(f"{rounds} rounds; medians at most {LIMIT}: {'met' if good else 'MISSED'}\n")
    return found, good


def measure_way(way: str, rounds: int, sizes: Mapping[str, int] = SIZES) -> list[dict[str, Any]]:
    """Run `measure` on two new ranks of one thread each; return what each of them measured."""
    asked = {"way": way, "rounds": rounds, "sizes": dict(sizes)}
    return run_world("benchmarks.mesh_time:measure", 2, asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"some of: {'; '.join(WAYS)}; all without any")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if wrong := [name for name in arguments.ways if name not in WAYS]:
        parser.error(f"no way {wrong[0]!r} to split; known: {'; '.join(WAYS)}")
    return 0 if benchmark_mesh(arguments.ways or tuple(WAYS), arguments.rounds)[1] else 1


if __name__ == "__main__":
    sys.exit(main())
