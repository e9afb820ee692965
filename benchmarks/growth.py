"""Growth with the ranks of a world, at rank 0 and on the slowest rank: `python -m benchmarks.growth`.

    --real 2,4,8,16,32           runs of a tiny model on so many ranks of this machine
    --simulated 256,1024,4096    ranks that speak only unipar's protocol: threads in a few processes, --per a machine

Each simulated rank has a connection to rank 0's store of its own, and its part in the roll call, the links, a decision,
the exchange of run logs, the five rounds of a save and an agreement to stop; nothing is trained. Requests and bytes
are counted where ranks call the store, all of which go to rank 0's machine, and bytes at rank 0's own links.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tests.support.tiny import CONFIG
from unipar.checkpoint.protocol.joint_attempts import attempt_together
from unipar.distributed.meeting.links import Links
from unipar.distributed.meeting.roll_call import Presence, call_roll
from unipar.distributed.meeting.text_rounds import Decide, open_rounds
from unipar.distributed.meeting.tree import RankTree
from unipar.distributed.meeting.world_session import Session, link_all
from unipar.distributed.place import Place
from unipar.launcher.machines.run_logs import exchange_run_logs
from unipar.results.run_report import Report
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.training.stopping import StepAgreement
from unipar.utils.table import format_table

PATIENCE: Final = 300.0
PROCESSES: Final = 8
RUN_LOG: Final = json.dumps({"event": "step", "time": 1.7e9, "step": 100, "loss": 2.5, "norm": 1.25}) + "\n"
LINES_OF_RANK_0: Final = 2000
"""Lines of rank 0's run log, as of a run of 20,000 steps that logs every tenth; other ranks have three."""

PARTS: Final = ("roll call", "links", "decision", "run_logs", "checkpoint", "stop")


@final
class CountingStore:
    """Store that counts requests and the bytes of their values, on the way to another store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def call(*given: Any) -> Any:
            result = function(*given)
            self.counts["requests"] += 1
            self.counts["bytes"] += _size_of(given) + _size_of(result)
            return result

        return call


def _size_of(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(_size_of, value)) if isinstance(value, list | tuple) else 8


def simulate_rank(rank: int, size: int, per: int, port: int, folder: Path, ready: Callable[[], Any]) -> dict[str, Any]:
    """Return seconds, requests and bytes of each part on one rank."""
    own = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE))
    store: Any = CountingStore(own)
    machine = rank // per
    found: dict[str, Any] = {}
    links: list[Links] = []

    def counts() -> Counter[str]:
        """Return what has passed rank 0 up to now, by this rank's requests or, if it is rank 0, over its links."""
        passed = sum(link.sent + link.received for one in links for link in one.all) if rank == 0 else 0
        return Counter(store.counts) + Counter({"links": passed})

    def part(name: str, function: Callable[[], Any]) -> Any:
        ready()
        before, began = counts(), time.perf_counter()
        result = function()
        seconds = time.perf_counter() - began
        spent = counts()
        spent.subtract(before)
        found[name] = {"seconds": seconds, **spent}
        return result

    mine = Presence(f"m{machine}", f"node{machine}", f"127.{1 + machine // 200}.{machine % 200}.1")
    roll = part("roll call", lambda: call_roll(store, rank, size, mine, PATIENCE, lambda _: mine.address))
    local = roll.neighbours.here.ranks
    place = Place(rank=rank, size=size, local_rank=local.index(rank), local_size=len(local), launcher="x")

    def link() -> Session:
        tree = RankTree(store, rank, size, roll.neighbours, PATIENCE)
        links.append(tree.links)
        return Session(place, store, link_all(tree, place, roll.machines, PATIENCE), tree)

    session: Session = part("links", link)
    part("decision", lambda: session.decide("d", "x" * 300, lambda texts: str(len(texts)), PATIENCE))
    run = folder / str(machine)
    run.mkdir(exist_ok=True)
    run_log_path(run, rank).write_text(RUN_LOG * (LINES_OF_RANK_0 if rank == 0 else 3), encoding="utf-8")
    world: Any = SimpleNamespace(
        rank=rank,
        size=size,
        machines=session.machines,
        store=store,
        device=torch.device("cpu"),
        key=str,
        tree=session.tree,
        launch="launch",
    )
    part("run_logs", lambda: exchange_run_logs(world, run, range(per, size)))
    part("checkpoint", lambda: _save(open_rounds(world, "save"), rank))
    part("stop", lambda: _agree_to_stop(StepAgreement(world, "stop"), rank, ready))
    ready()
    links[0].close()
    return found


def _save(decide: Decide, rank: int) -> None:
    """Take the five rounds of a save in which each rank writes one shard; the manifest has a row for each."""

    def attempt(what: Callable[[], Any]) -> list[Any]:
        return attempt_together(decide, what, lambda failure, _: failure)

    attempt(lambda: None)
    needed = attempt(lambda: 4_000_000)
    attempt(lambda: f"step-{sum(needed)}" if rank == 0 else "")
    shard = f"shards/rank-{rank:05}-00000.safetensors"
    row = ["layer.weight", "weight", "F32", [1024, 1024], shard, "layer.weight", rank * 1024, 1024]
    attempt(lambda: {"files": {shard: [4_000_000, f"{hash((rank, 1)) & (2**256 - 1):064x}"]}, "rows": [row]})
    attempt(lambda: [4_000_000, [], []] if rank == 0 else None)


def _agree_to_stop(agreement: StepAgreement, rank: int, together: Callable[[], Any]) -> None:
    """Take steps together until all agree on the last; rank 1 wishes it."""
    step = 0
    while not agreement(step, "a signal" if rank == 1 else ""):
        step += 1
        together()


def _simulate_or_exit(rank: int, *given: Any) -> dict[str, Any]:
    """Return what simulate_rank returns; an error ends the process, as other ranks wait for this one."""
    try:
        return simulate_rank(rank, *given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _process(ranks: Sequence[int], size: int, per: int, port: int, folder: Path, barrier: Any, results: Any) -> None:
    sys.setswitchinterval(1.0)  # hundreds of threads that each ask for the interpreter every 5 ms do nothing else
    own = threading.Barrier(len(ranks), action=barrier.wait)
    threading.stack_size(256 * 1024)
    with ThreadPoolExecutor(len(ranks)) as pool:
        waits = [pool.submit(_simulate_or_exit, r, size, per, port, folder, own.wait) for r in ranks]
        results.put([(rank, one.result()) for rank, one in zip(ranks, waits, strict=True)])


def _next_result(results: Any, started: Sequence[Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a process; raise RuntimeError if one has ended with an error."""
    while True:
        with suppress(Empty):
            return results.get(timeout=1.0)
        if any(process.exitcode for process in started):
            for process in started:
                process.kill()
            raise RuntimeError("a simulated rank has failed; its error is above")


def simulate(size: int, per: int) -> dict[str, dict[str, float]]:
    """Return for each part the slowest rank's seconds, and requests and bytes that have passed rank 0."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1", port, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    number = min(PROCESSES, size - 1)
    shares = [range(1), *(range(1 + i, size, number) for i in range(number))]  # rank 0 has a process of its own
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(shares)), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=_process, args=(share, size, per, port, Path(folder), barrier, results))
            for share in shares
        ]
        for process in started:
            process.start()
        rows = dict(row for _ in started for row in _next_result(results, started))
        for process in started:
            process.join()
    del server
    return {
        name: {
            "seconds": max(row[name]["seconds"] for row in rows.values()),
            "requests": sum(row[name].get("requests", 0) for row in rows.values()),
            "bytes": sum(row[name].get("bytes", 0) + row[name].get("links", 0) for row in rows.values()),
        }
        for name in PARTS
    }


def start_real(size: int) -> tuple[str, ...]:
    """Return, of a run of a tiny model on so many ranks: seconds to the first step and in all, kB of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "x.json"
        own = {**CONFIG, "task": {"use": "tests.support.tiny:Tiny"}, "parallel": {"data": size}, "batch": {"total": 64}}
        config.write_text(json.dumps({**own, "log": {"every": 1}, "out": f"{folder}/run"}), encoding="utf-8")
        began, since = time.perf_counter(), time.time()
        command = [sys.executable, "-m", "unipar", "run", str(config)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        whole = time.perf_counter() - began
        rows = list(RunLog.read(run_log_path(Path(folder) / "run", 0)))
        first = next(row["time"] for row in rows if row["event"] == "step") - since
        run_logs = sum(path.stat().st_size for path in (Path(folder) / "run").glob("rank-*.jsonl"))
        logs = sum(path.stat().st_size for path in (Path(folder) / "run").glob("rank-*.log"))
        peak = max(Report.read(Path(folder) / "run").peak_rss) / 2**20
    return str(size), f"{first:.1f}", f"{whole:.1f}", f"{run_logs / 1e3:.1f}", f"{logs / 1e3:.1f}", f"{peak:.0f}"


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    asked.formatter_class = argparse.RawDescriptionHelpFormatter
    asked.add_argument("--simulated", default="256,1024,4096", help="numbers of simulated ranks")
    asked.add_argument("--real", default="2,4,8,16,32", help="numbers of real ranks; '' for none")
    asked.add_argument("--per", type=int, default=8, help="simulated ranks on a machine (default 8)")
    chosen = asked.parse_args()
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if chosen.real:
        names = ("ranks", "s to the first step", "s in all", "kB of run logs", "kB of logs", "MiB, largest rank")
        print(format_table(names, [start_real(int(size)) for size in chosen.real.split(",")], width=100), flush=True)
    header = ("ranks", *(f"{name}: s, requests, kB" for name in PARTS))
    rows: list[tuple[str, ...]] = []
    for size in map(int, filter(None, chosen.simulated.split(","))):
        found = simulate(size, chosen.per)
        each = [f"{one['seconds']:.2f}, {one['requests']:.0f}, {one['bytes'] / 1e3:.1f}" for one in found.values()]
        rows.append((str(size), *each))
        print(json.dumps({"ranks": size, **found}), file=sys.stderr, flush=True)
    if rows:
        print(format_table(header, rows, width=200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
