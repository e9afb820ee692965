"""Trainings within a limit on memory, from what `unipar plan` says of them.

    python -m benchmarks.plan.limits                    240 trainings in a limit in which they fit, 60 in one in which
                                                        they do not, and 20 with what libraries allocate counted
    python -m benchmarks.plan.limits --fits 20 --lacks 5 --control 2
    python -m benchmarks.plan.limits strategy=deepspeed/parameters ranks=2
    python -m benchmarks.plan.limits compile=blocks strategy=native/nothing,deepspeed/gradients

Models, precisions, microbatches, ranks and strategies are drawn at random. The limit is on the bytes of tensors that
each rank allocates from the moment on at which the ranks have met; an allocation beyond it fails. "Fits" is the
smallest memory in which the plan says so, with 5 % of headroom. "Lacks" is up to 5 % less than the planned peak.
In the control group the limit is on all that a rank allocates: the planned peak, what a recorded step shows that
libraries and Python hold for themselves, and 5 %. Results are kept in runs/plan-limits.jsonl, and one counts as long as
the plan of its training is the same; --again trains all anew.
Exit 1: a training that fits ran out of memory, or fewer than 9 in 10 of those that do not fit did.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.memory import measure_account
from benchmarks.plan.__main__ import NOT_PLANNED
from benchmarks.plan.limited_rank import ENTRY, ENTRY_MODULE
from benchmarks.plan.rows import Row, all_strategies, config_of, predict_strategy
from unipar.backend import registry
from unipar.config import Strategy
from unipar.config.settled import SettledConfig
from unipar.errors import UniparError
from unipar.launcher.micro_batch.trials import ended_for_lack_of_memory
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.starters import ENTRY_MODULES, SharedForkServer
from unipar.memory.sources.malloc_build import build_meter, preload_environment
from unipar.run_folder import folder
from unipar.task.reference import TaskRef
from unipar.utils.table import format_table
from unipar.utils.text import format_duration, format_size

HEADROOM = 0.05
SEED = 42
STORE = Path("runs/plan-limits.jsonl")

MEMORY = "no memory:"
"""Beginning of why a training ended for lack of memory."""

Group = Literal["fits", "lacks", "control"]
NUMBERS: Mapping[Group, int] = {"fits": 240, "lacks": 60, "control": 20}
LEAST_TO_FAIL = 0.9
"""Share of the trainings that do not fit which must run out of memory, at least."""


@dataclass(frozen=True)
class LimitedTraining:
    """A training, and the limit within which it ran."""

    row: dict[str, Any]
    group: Group
    planned: int
    limit: int
    ended: str
    """Why it ended: "" if it did all its steps; "memory" and where that ran out; else the error."""

    @property
    def good(self) -> bool:
        """Whether it ended as the plan said."""
        return self.ended.startswith(MEMORY) if self.group == "lacks" else not self.ended


def draw_row(chance: random.Random, strategies: Sequence[str], given: Mapping[str, str]) -> Row:
    """Return a row of a random model in one of these strategies that can run."""
    while True:
        heads = chance.choice((2, 4, 8))
        layers, width = chance.randint(3, 8), heads * 8 * chance.randint(32 // heads, 80 // heads)
        model = f"{layers} layers, width {width}, {heads} heads, context {chance.choice((32, 64, 96, 128))}"
        row = Row(
            model=model,
            strategy=chance.choice(strategies),
            precision=chance.choice(("fp32", "bf16-mixed", "bf16-master")),
            ranks=int(given.get("ranks", 0)) or chance.choice((1, 2, 2, 2, 4)),
            micro=chance.randint(1, 8),
            recompute=chance.choice(("none", "blocks")),
            accumulate=chance.choice((1, 1, 2, 3)),
            compile=given.get("compile", "none"),
        )
        alone, axes = row.strategy == "single", Strategy.parse(row.strategy).axes.ranks
        if (alone or axes > 1) and (alone != (row.ranks == 1) or row.ranks % axes):
            continue
        try:
            config_of(row)
        except UniparError:
            continue
        return row


def train_within(settled: SettledConfig, limit: int, counted: str, server: SharedForkServer) -> str:
    """Train some steps within a limit; return why they ended before the last."""
    backend = registry.find_backend(settled.strategy.backend)
    ref = TaskRef.of(None, settled.config.task, {})
    launch = {"task": ref.to_json(), "settled": settled.to_json(), "limit": limit, "counted": counted}
    with tempfile.TemporaryDirectory(prefix="unipar-limit-") as place:
        run = Path(place) / "run"
        try:
            with (
                folder.create_run_folder(run, settled.config.json_for_ranks(), json.dumps(launch), overwrite=False),
                backend.host(settled.config, settled.ranks) as hosted,
                WorkerGroup.of(
                    settled,
                    backend,
                    run,
                    ENTRY,
                    {**preload_environment(build_meter()), "OMP_NUM_THREADS": "1", **hosted},
                    pickled_task=ref.pickled_task,
                    starter=server.starter_of(backend),
                ) as workers,
            ):
                while not workers.poll(0.1):
                    pass
        except UniparError as e:
            said = str(e).splitlines()[0]
            return (
                f"{MEMORY} {said.partition(';')[0]}" if ended_for_lack_of_memory(e) else f"{type(e).__name__}: {said}"
            )
    return ""


def train(
    row: Row, group: Group, share: float, server: SharedForkServer, kept: LimitedTraining | None
) -> LimitedTraining:
    """Return a training that ran within a limit: `kept`, if it had the limits of today's plan.

    `share`: that of the planned peak which is the limit, where it does not fit.
    """
    config, strategy = config_of(row), Strategy.parse(row.strategy)
    step = predict_strategy(config, strategy, row.ranks)
    planned = step.peak
    settled = SettledConfig.of(config, strategy, row.ranks, "cpu")
    limit, counted = int(step.needed / (1 - HEADROOM)), "tensors"
    if group == "lacks":
        limit = int(planned * share)
    if kept is not None and kept.planned == planned and (group == "control" or abs(kept.limit - limit) <= 1):
        return kept
    if group == "control":
        full = measure_account(settled, preload_environment(build_meter())).peak
        limit = int((step.needed + sum(full.held.get(category, 0) for category in NOT_PLANNED)) / (1 - HEADROOM))
        counted = "all"
    return LimitedTraining(asdict(row), group, planned, limit, train_within(settled, limit, counted, server))


def draw_all(
    options: argparse.Namespace, given: Mapping[str, str], kept: Collection[LimitedTraining]
) -> Iterator[tuple[Row, Group, float]]:
    """Yield each training: its row, its group, and the share of the peak that it may use where it does not fit.

    Those that ran come first, and others are drawn until there are as many as asked for.
    """
    chosen = [
        strategy for strategy in all_strategies() if not strategy.endswith("+library")
    ]  # buckets of 1.9 GiB hide all else
    strategies = given["strategy"].split(",") if "strategy" in given else chosen
    groups: Sequence[Group] = ("fits", "lacks", "control")
    for group in groups:
        chance = random.Random(f"{SEED} {group}")
        ran = {Row(**one.row): one.limit / one.planned for one in kept if one.group == group}
        ran = {
            row: share
            for row, share in ran.items()
            if row.strategy in strategies
            and str(row.ranks) in given.get("ranks", str(row.ranks))
            and row.compile == given.get("compile", "none")
        }
        number = getattr(options, group)
        for row, share in list(ran.items())[:number]:
            yield row, group, share
        while len(ran) < number:
            row, share = draw_row(chance, strategies, given), chance.uniform(1 - HEADROOM, 1.0)
            if row not in ran:
                ran[row] = share
                yield row, group, share


def main(arguments: Sequence[str]) -> int:
    """Train all, print those that did not end as planned, and the numbers; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan.limits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("values", nargs="*")
    for group, number in NUMBERS.items():
        parser.add_argument(f"--{group}", type=int, default=number)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    given = dict(word.split("=", 1) for word in options.values)
    STORE.parent.mkdir(exist_ok=True)
    lines = STORE.read_text("utf-8").splitlines() if STORE.exists() and not options.again else []
    stored = [LimitedTraining(**made) for made in map(json.loads, lines)]
    kept = {(one.group, Row(**one.row)): one for one in stored}
    began, results = time.monotonic(), list[LimitedTraining]()
    environment = preload_environment(build_meter())
    todo = list(draw_all(options, given, kept.values()))
    with SharedForkServer([*ENTRY_MODULES, ENTRY_MODULE, "unipar.comparison.comparison_worker"], environment) as server:
        server.start([registry.find_backend(name) for name in ("native", "deepspeed", "horovod", "accelerate")])
        for number, (row, group, share) in enumerate(todo, 1):
            earlier = kept.get((group, row))
            result = train(row, group, share, server, earlier)
            if result is not earlier:
                with STORE.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            results.append(result)
            print(
                f"{number} of {len(todo)}, {format_duration(time.monotonic() - began)}:", *show(result), file=sys.stderr
            )
    return report(results)


def show(result: LimitedTraining) -> tuple[str, ...]:
    """Return a row of the table."""
    ended = result.ended or "all steps"
    return (result.group, *Row(**result.row).words, format_size(result.planned), format_size(result.limit), ended)


def report(results: Sequence[LimitedTraining]) -> int:
    """Print what did not end as planned, and the numbers; return the exit code."""
    bad = [result for result in results if not result.good]
    if bad:
        header = ("group", "model", "precision", "ranks", "micro", "", "strategy", "planned", "limit", "ended with")
        print(format_table(header, [show(result) for result in bad], right=(3, 4, 7, 8), width=170))
    of, good = Counter(r.group for r in results), Counter(r.group for r in results if r.good)
    print(f"fits, with {HEADROOM:.0%} of headroom: {of['fits'] - good['fits']} of {of['fits']} ran out of memory")
    print(f"lacks up to {HEADROOM:.0%} of the planned peak: {good['lacks']} of {of['lacks']} ran out of memory")
    print(f"control, all allocations counted: {of['control'] - good['control']} of {of['control']} ran out of memory")
    never = good["fits"] == of["fits"] and good["control"] == of["control"]
    return int(not never or good["lacks"] < LEAST_TO_FAIL * of["lacks"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
