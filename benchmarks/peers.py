"""Time of a step beside other libraries as people use them, with their defaults: `make bench ARGS=peers`."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import Interval, interval
from unipar.backend.installed import library_versions
from unipar.comparison.training_rounds import rotate_order
from unipar.errors import UniparError
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.progress import Progress
from unipar.utils.table import format_table

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
ROUNDS, STEPS, WARM = 24, 2, 6
"""Rounds, and steps in a turn and before the first one; every turn has one logged step."""

NEVER_ABOVE, WITHOUT_FUSED = 1.0, 0.92
"""Bars for unipar's time of a step, divided by the peer's; the second where the peer's default is not fused."""


@dataclass(frozen=True)
class Peer:
    """Another way to train the quickstart, and the strategy of unipar that corresponds to it."""

    name: str
    strategy: str
    fused: bool
    """Whether its default is a fused optimizer."""

    @property
    def bar(self) -> float:
        return NEVER_ABOVE if self.fused else WITHOUT_FUSED


PEERS = (
    (
        Peer("DDP", "native/nothing", fused=False),
        Peer("Accelerate", "native/nothing", fused=False),
        Peer("Fabric", "native/nothing", fused=False),
        Peer("Lightning", "native/nothing", fused=False),
        Peer("HF Trainer", "native/nothing", fused=True),
    ),
    (
        Peer("DeepSpeed ZeRO-0", "deepspeed/nothing", fused=True),
        Peer("DeepSpeed ZeRO-1", "deepspeed/optimizer", fused=True),
        Peer("DeepSpeed ZeRO-2", "deepspeed/gradients", fused=True),
        Peer("ZeRO-2, torch_adam", "deepspeed/gradients", fused=False),
    ),
)
"""Peers by group: processes of one group are alive at the same time."""

LIBRARIES = ("torch", "accelerate", "lightning", "transformers", "deepspeed")


@dataclass(frozen=True)
class Took:
    """Time of a step."""

    seconds: float
    """Wall clock on the slower rank."""

    cpu: float
    """CPU time of both ranks."""


class Contestant:
    """Two ranks that train in turns, blocked in between."""

    def __init__(self, name: str, strategy: str, changes: Mapping[str, Any]) -> None:
        """Prepare `name`, a peer or unipar, to train the quickstart with `changes`; the strategy is unipar's."""
        self.name, self.strategy, self._changes = name, strategy, changes
        self.loss = float("nan")
        """Loss that was logged last."""

    @contextmanager
    def start(self) -> Generator[None]:
        """Context manager: the ranks run and have taken their first steps, untimed."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unipar-peers-"))) / "run"
            backend, _, shard = self.strategy.partition("/")
            changes = {**self._changes, "backend": backend, "parallel.shard": shard, "out": str(folder)}
            plan = PreparedRun.of(prepare(QUICKSTART, overrides=changes), overwrite=False)
            stack.enter_context(plan.create_folder())
            (folder / "contestant.json").write_text(json.dumps({"name": self.name, "port": free_port()}), "utf-8")
            environment = {"PYTHONPATH": str(ROOT), **stack.enter_context(plan.backend.host(plan.config, plan.size))}
            entry = "benchmarks.peers_inside:train_in_turns"
            log = stack.enter_context((folder / "progress").open("w", encoding="utf-8"))
            # what `launch` does while its workers train: it shows their progress
            self._progress = stack.enter_context(Progress(folder, plan.config.train.steps, out=log, err=log))
            self._workers = stack.enter_context(
                WorkerGroup.of(plan.settled, plan.backend, folder, entry, environment, control=True)
            )
            self._answers()
            yield

    def turn(self, steps: int) -> Took:
        """Train so many steps; return the time of one."""
        self._workers.send_to_all(str(steps).encode())
        answers = self._answers()
        self.loss = answers[0]["loss"]
        return Took(max(answer["seconds"] for answer in answers), sum(answer["cpu"] for answer in answers))

    def _answers(self) -> list[dict[str, Any]]:
        while True:
            try:
                return [json.loads(m) for m in self._workers.receive_from_all(self._progress.every)]
            except TimeoutError:
                if self.name == "unipar":
                    self._progress.tick()


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def measure_pairs(
    peers: Sequence[Peer], rounds: int, changes: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return for each peer the times of all rounds; in each round it takes a turn beside a turn of its strategy."""
    # one step more than is taken: the last step of a run logs and ends it
    changes = {"train.steps": WARM + rounds * STEPS * len(peers) + 1, "log.every": STEPS, **(changes or {})}
    with ExitStack() as stack:
        strategies = {
            strategy: Contestant("unipar", strategy, changes) for strategy in dict.fromkeys(p.strategy for p in peers)
        }
        for contestant in strategies.values():
            stack.enter_context(contestant.start())
            contestant.turn(WARM)
        others: dict[str, Contestant] = {}
        failed: dict[str, dict[str, Any]] = {}
        for peer in peers:
            other = Contestant(peer.name, peer.strategy, changes)
            try:
                stack.enter_context(other.start())
                other.turn(WARM)
                others[peer.name] = other
            except UniparError as e:
                failed[peer.name] = {"failed": str(e)}
        running = [peer for peer in peers if peer.name in others]
        took: dict[str, tuple[list[Took], list[Took]]] = {peer.name: ([], []) for peer in running}
        for i in range(rounds):
            for peer in rotate_order(running, i):
                pair = (strategies[peer.strategy], others[peer.name])
                for at in (0, 1) if i % 2 else (1, 0):
                    took[peer.name][at].append(pair[at].turn(STEPS))
        return failed | {
            peer.name: {
                "strategy": peer.strategy,
                "bar": peer.bar,
                "unipar": [asdict(t) for t in took[peer.name][0]],
                "peer": [asdict(t) for t in took[peer.name][1]],
                "losses": [strategies[peer.strategy].loss, others[peer.name].loss],
            }
            for peer in running
        }


def ratio_of(row: Mapping[str, Any], clock: str) -> Interval:
    """Return the ratio of unipar's time of a step to the peer's, in pairs of neighbouring turns."""
    return interval([ours[clock] / theirs[clock] for ours, theirs in zip(row["unipar"], row["peer"], strict=True)])


def format_row(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a peer's line in the table."""
    if "failed" in row:
        return name, f"failed: {row['failed']}"
    wall, cpu = ratio_of(row, "seconds"), ratio_of(row, "cpu")
    ours, theirs = (statistics.median(t["seconds"] for t in row[who]) * 1e3 for who in ("unipar", "peer"))
    return (
        name,
        row["strategy"],
        f"{ours:.0f}",
        f"{theirs:.0f}",
        f"{wall.middle:.3f} [{wall.low:.3f}..{wall.high:.3f}]",
        f"{row['bar']:.2f} {'met' if wall.middle <= row['bar'] else 'MISSED'}",
        f"{cpu.middle:.3f}",
    )


def benchmark_peers(chosen: Collection[str] = (), rounds: int = ROUNDS) -> tuple[dict[str, Any], bool]:
    """Measure the wall clock of a step on two ranks, data and log included, beside each peer with its defaults."""
    found: dict[str, Any] = {}
    for group in PEERS:
        peers = [peer for peer in group if peer.name in chosen or not chosen]
        if peers:
            found |= measure_pairs(peers, rounds)
    header = ("two ranks, quickstart", "strategy", "unipar ms", "peer ms", "unipar / peer", "at most", "CPU time")
    print(format_table(header, [format_row(*item) for item in found.items()], right=(2, 3)))
    good = all("failed" not in row and ratio_of(row, "seconds").middle <= row["bar"] for row in found.values())
    print(f"{rounds} rounds; ratios at or below their limits: {'met' if good else 'MISSED'}\n")
    return {"rounds": rounds, "versions": library_versions(LIBRARIES), "peers": found}, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help="names of peers; all without any")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    known = [peer.name for group in PEERS for peer in group]
    if wrong := [name for name in arguments.peers if name not in known]:
        parser.error(f"no peer {wrong[0]!r}; known: {', '.join(known)}")
    return 0 if benchmark_peers(arguments.peers, arguments.rounds)[1] else 1


if __name__ == "__main__":
    sys.exit(main())
