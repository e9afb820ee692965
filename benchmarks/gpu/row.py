"""One row of `make gpu`, in a process of its own: `python -m benchmarks.gpu.row KIND ARGUMENTS RESULT`.

A row returns its figure, or raises RowFailed with the figure that was wrong.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"
SIZES = {"layers": 5, "width": 384, "heads": 6, "context": 64}
MIB = 2**20
UNNAMED_SHARE_LIMIT, PEAK_TOLERANCE, PEAK_TOLERANCE_BYTES = 0.02, 0.01, 2 * MIB
"""Largest share of a peak without a category; largest difference between the run log and the allocator's own peak."""

PEAK_TOLERANCE_OVER_GLOO = 0.03
"""Largest difference where two ranks share a GPU: gloo's threads free what they sent a step earlier or later."""

LINES_OF_A_RANK = 60
"""Lines of a rank's log that a row prints where a test fails."""

STEPS_AROUND = 3
"""Plain steps after the recorded ones, in which the allocator's own peak is read."""


class RowFailed(Exception):
    """Error of a row that ran to its end and found something wrong; its text is the row's figure."""


def device_name(device: str, ranks: int) -> str:
    """Return `device:` of a config: several ranks share the first GPU, over gloo, since NCCL refuses that."""
    return device if device == "cpu" or ranks == 1 else "cuda:0"


def overrides_for(device: str, ranks: int, folder: str) -> dict[str, Any]:
    """Return the changes that put the quickstart on the device."""
    return {"device": device_name(device, ranks), "parallel.data": ranks, "out": f"{folder}/out"}


def packages(device: str, ranks: int, folder: str) -> str:
    """Import everything, and check the quickstart in each installed backend."""
    from unipar.backend import registry

    names: list[str] = []
    for name in registry.backend_names():
        backend = registry.find_backend(name)
        why = registry.why_not_installed(backend)
        if why is None:
            backend.version()
            names.append(name)
    missing = {"native", "deepspeed", "accelerate"} - set(names)
    if missing:
        raise RowFailed(f"not installed: {', '.join(sorted(missing))}")
    words = [sys.executable, "-m", "unipar", "check", str(QUICKSTART)]
    for backend in ("native", "deepspeed", "accelerate"):
        done = subprocess.run([*words, "--backend", backend], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RowFailed(f"unipar check --backend {backend}: {done.stdout}{done.stderr}".strip())
    absent = sorted(set(registry.backend_names()) - set(names))
    return f"{', '.join(names)} import" + (f"; not here: {', '.join(absent)}" if absent else "")


def device(device: str, ranks: int, folder: str) -> str:
    """Multiply matrices in three precisions, compare them with the CPU, and ask the driver."""
    import torch

    from unipar.distributed.accelerators import count_visible_gpus
    from unipar.memory.sources.nvml import query_bytes_used

    one, other = (torch.randn(512, 512, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    wanted, worst = one @ other, 0.0
    for dtype, limit in ((torch.float32, 1e-2), (torch.float16, 5e-1), (torch.bfloat16, 2.0)):
        found = (one.to("cuda", dtype) @ other.to("cuda", dtype)).float().cpu()
        off = float((found - wanted).abs().max())
        worst = max(worst, off / limit)
        if not off < limit:
            raise RowFailed(f"a product in {dtype} is off by {off:g}, more than {limit:g}")
    if count_visible_gpus() != torch.cuda.device_count():
        raise RowFailed(f"NVML counts {count_visible_gpus()} visible GPUs, torch {torch.cuda.device_count()}")
    properties = torch.cuda.get_device_properties(0)
    used, why = query_bytes_used(f"GPU-{properties.uuid}")
    driver = f"{used / MIB:.0f} MiB by NVML" if used is not None else why
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, products within limits; {driver}"


COLLECTIVES = """
import os, sys, torch, torch.distributed as dist
device = torch.device(sys.argv[1])
if device.type == "cuda":
    torch.cuda.set_device(device.index or 0)
dist.init_process_group(sys.argv[2])
rank, size = dist.get_rank(), dist.get_world_size()
def check(name, act):
    try:
        got, wanted = act()
        said = "ok" if torch.equal(got.cpu(), wanted) else f"gave {got.tolist()}, not {wanted.tolist()}"
    except Exception as e:
        said = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
    if rank == 0:
        print(f"collective {name}: {said}", flush=True)
def ones(n=size):
    return torch.full((n,), float(rank + 1), device=device)
total = size * (size + 1) / 2
def all_reduce():
    t = ones(); dist.all_reduce(t); return t, torch.full((size,), total)
def all_reduce_avg():
    t = ones(); dist.all_reduce(t, op=dist.ReduceOp.AVG); return t, torch.full((size,), total / size)
def broadcast():
    t = ones(); dist.broadcast(t, 0); return t, torch.ones(size)
def all_gather_into_tensor():
    t = torch.zeros(size, device=device); dist.all_gather_into_tensor(t, ones(1))
    return t, torch.arange(1.0, size + 1)
def reduce_scatter_tensor():
    t = torch.zeros(1, device=device); dist.reduce_scatter_tensor(t, ones()); return t, torch.full((1,), total)
def all_to_all_single():
    t = torch.zeros(size, device=device); dist.all_to_all_single(t, ones()); return t, torch.arange(1.0, size + 1)
def all_gather():
    t = [torch.zeros(1, device=device) for _ in range(size)]; dist.all_gather(t, ones(1))
    return torch.cat(t), torch.arange(1.0, size + 1)
def reduce():
    t = ones(); dist.reduce(t, 0)
    return (t, torch.full((size,), total)) if rank == 0 else (torch.zeros(1), torch.zeros(1))
for act in (all_reduce, all_reduce_avg, broadcast, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single,
            all_gather, reduce):
    check(act.__name__, act)
dist.barrier()
if rank == 0:
    print("collectives done", flush=True)
os._exit(0)
"""
"""Script of one rank: each collective that a backend may need, on tensors of the device."""

REQUIRED_COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather")
"""Collectives without which a backend cannot train; the others are reported."""


def collectives(device: str, ranks: int, folder: str) -> str:
    """Call collectives on the device, without unipar: over NCCL in a world of one, over gloo where ranks share it."""
    where = device_name(device, ranks)
    transport = "nccl" if where == "cuda" else "gloo"
    script = Path(folder, "collectives.py")
    script.write_text(COLLECTIVES, encoding="utf-8")
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", "--master-port=0"]
    words += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, *words, str(script), where, transport], capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    found = dict(re.findall(r"^collective (\w+): (.*)$", done.stdout, re.MULTILINE))
    bad = {name: said for name, said in found.items() if said != "ok"}
    text = f"{transport}: {len(found) - len(bad)} of {len(found)} work"
    text += "".join(f"; {name}: {said}" for name, said in bad.items())
    if "collectives done" not in done.stdout or set(bad) & set(REQUIRED_COLLECTIVES):
        raise RowFailed(text)
    return text


def verify(device: str, ranks: int, folder: str, *, strategies: str) -> str:
    """Run `unipar verify` on the quickstart in these strategies."""
    import unipar

    changes = overrides_for(device, ranks, folder)
    found = unipar.verify(QUICKSTART, strategies=[strategies], world=ranks, overrides=changes, overwrite=True)
    print(found.table(120))
    outcomes = {row.strategy: row.outcome for row in found.rows}
    agree = [strategy for strategy, outcome in outcomes.items() if outcome == "agrees"]
    others = [f"{row.strategy} {row.outcome}: {row.note}".strip(": ") for row in found.rows if row.outcome != "agrees"]
    text = "; ".join([f"{len(agree)} of {len(outcomes)} strategies agree", found.stopped, *others]).replace("; ;", ";")
    if found.code:
        raise RowFailed(text)
    return text.removesuffix("; ")


def compare(device: str, ranks: int, folder: str) -> str:
    """Run `unipar compare` on the quickstart, and compare losses on the device with those of the CPU."""
    import unipar
    from unipar.results.comparison import Comparison

    found = unipar.compare(QUICKSTART, world=ranks, overrides=overrides_for(device, ranks, folder), overwrite=True)
    print(found.table(120))
    assert isinstance(found, Comparison)
    ran = [row for row in found.rows if row.outcome == "ran"]
    named = {row.strategy: row.timed_seconds for row in ran if row.timed_seconds}
    medians = {strategy: sorted(seconds)[len(seconds) // 2] for strategy, seconds in named.items()}
    fastest = min(medians, key=medians.__getitem__) if medians else ""
    others = [
        " ".join([row.strategy, row.outcome, *row.note.splitlines()[:1]]) for row in found.rows if row.outcome != "ran"
    ]
    parts = [f"{len(ran)} of {len(found.rows)} strategies ran"]
    parts += [f"fastest {fastest}, {medians[fastest] * 1e3:.1f} ms a step"] if fastest else []
    parts += [f"memory: {found.unwatched}"] if found.unwatched else []
    if device != "cpu" and ran:
        parts.append(_beside_the_cpu(found.rows[0].losses, folder))
    text = "; ".join(parts + others)
    if found.code:
        raise RowFailed(text)
    return text


def _beside_the_cpu(losses: list[float], folder: str) -> str:
    """Return how far the device's losses are from those of the CPU; raise RowFailed beyond TF32's rounding."""
    import unipar

    changes = {"backend": "single", **overrides_for("cpu", 1, f"{folder}/cpu"), "log.every": 1}
    wanted = unipar.launch(QUICKSTART, overrides=changes, quiet=True).losses
    off = largest_difference(losses, [loss for _, loss in wanted])
    text = f"losses within {off:.1e} of the CPU's"
    if not off < 0.01:
        raise RowFailed(text)
    return text


def largest_difference(losses: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of two series of losses; infinite if one is shorter or not finite."""
    if len(losses) != len(wanted) or not losses:
        return float("inf")
    differences = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, wanted, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("inf")


def _losses(strategy: str, ranks: int, device: str, changes: dict[str, Any], folder: str) -> list[float]:
    """Return the losses of a run of the quickstart's model in a strategy."""
    import unipar
    from unipar.backend import offered_strategies as strategies
    from unipar.config import Strategy
    from unipar.config.config_source import load_given_config

    settings: dict[str, Any] = {
        "task": {"use": f"{ROOT}/examples/char_gpt.py:CharGPT", "args": SIZES},
        "device": device_name(device, ranks),
        "parallel": {"data": ranks},
        "batch": {"total": 8},
        "train": {"steps": 8, "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1}, "clip": 1.0},
        "log": {"every": 1},
        "out": folder,
    }
    for key, value in changes.items():
        known = settings.get(key)
        settings[key] = {**known, **value} if isinstance(known, dict) else value
    config = strategies.config_in_strategy(load_given_config(settings, None).config, Strategy.parse(strategy))
    return [loss for _, loss in unipar.launch(config, quiet=True).losses]


def train(device: str, ranks: int, folder: str, *, strategy: str, changes: dict[str, Any], tolerance: float) -> str:
    """Train in a strategy with changed settings, and compare the losses with those of one process as it is."""
    wanted = _losses("single", 1, device, {}, f"{folder}/single")
    off = largest_difference(_losses(strategy, ranks, device, changes, f"{folder}/strategy"), wanted)
    text = f"losses within {off:.1e} of one process in fp32, allowed {tolerance:g}"
    if not off <= tolerance:
        raise RowFailed(text)
    return text


def account(device: str, ranks: int, folder: str, *, strategy: str) -> str:
    """Record memory, and compare the account's sum with the allocator's own peak in plain steps after it."""
    from unipar.backend import offered_strategies as strategies
    from unipar.comparison.strategy_world import StrategyWorld
    from unipar.config import Strategy
    from unipar.config.config_source import load_given_config
    from unipar.config.settled import SettledConfig
    from unipar.memory.account import PASSES_BY_IMPORTANCE, PASSES_IN_ORDER
    from unipar.memory.sources.malloc_build import build_meter, preload_environment
    from unipar.task.reference import TaskRef

    where, passes = device_name(device, ranks), sorted(PASSES_BY_IMPORTANCE, key=PASSES_IN_ORDER.index)
    settings: dict[str, Any] = {
        "task": {"use": f"{ROOT}/benchmarks/gpu/peaks.py:PeakGPT", "args": {**SIZES, "folder": folder}},
        "device": where,
        "parallel": {"data": ranks},
        "batch": {"total": 8},
        "train": {"steps": 2 + len(passes) + STEPS_AROUND, "optimizer": {"lr": 3e-4}},
    }
    config = strategies.config_in_strategy(load_given_config(settings, None).config, Strategy.parse(strategy))
    settled = SettledConfig.of(config, Strategy.parse(strategy), ranks, where)
    environment = preload_environment(build_meter()) if where == "cpu" else {}
    ref = TaskRef.of(None, config.task, {})
    with closing(StrategyWorld(settled, ref, Path(folder) / "run", environment)) as world:
        world.start("1")
        world.train_steps(2)
        world.record_memory(passes)
        accounts = world.accounts()
        world.train_steps(STEPS_AROUND)
    tolerance = PEAK_TOLERANCE if ranks == 1 else PEAK_TOLERANCE_OVER_GLOO
    lines = [check_account(account, folder, tolerance) for account in accounts]
    wrong = [text for text, good in lines if not good]
    if wrong:
        raise RowFailed("; ".join(wrong))
    return lines[0][0]


def check_account(account: Any, folder: str, tolerance: float = PEAK_TOLERANCE) -> tuple[str, bool]:
    """Return an account's figures as text, and whether sums, names and the allocator's own peak agree."""
    problems = [note for note in account.notes if "differ" in note or "torch kept" in note]
    problems += [
        f"{p.name}: parts sum to {sum(p.held.values())}" for p in account.phases if sum(p.held.values()) != p.peak
    ]
    worst = max(account.phases, key=lambda phase: abs(phase.unattributed))
    if abs(worst.unattributed) > UNNAMED_SHARE_LIMIT:
        problems.append("too much has no category")
    steps = [phase for phase in account.phases if phase.name != "built"]
    peak = account.base + max(phase.peak for phase in steps)
    parts = [f"sum {peak / MIB:.1f} MiB"]
    file = Path(folder, f"peak-{account.rank}.json")
    if file.exists():
        own = json.loads(file.read_text("utf-8"))
        parts.append(f"max_memory_allocated {own / MIB:.1f} MiB")
        if abs(own - peak) > max(PEAK_TOLERANCE_BYTES, tolerance * own):
            problems.append("the two differ")
    elif account.device == "cuda":
        problems.append("the allocator's own peak was not written")
    parts.append(f"{100 * worst.unattributed:.2f} % without a category in {worst.name}")
    return f"rank {account.rank}: " + ", ".join(parts) + "".join(f"; {p}" for p in problems), not problems


def test(device: str, ranks: int, folder: str, *, test: str) -> str:
    """Run one test function with all its parameters."""
    # plugins of the machine's own Python would bring options and warnings that the suite does not know
    words = ["-p", "no:cacheprovider", "-m", "gpu", "-v", "--tb=short", f"--basetemp={folder}/pytest", test]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout)
    summary = (done.stdout.strip().splitlines() or ["pytest gave no output"])[-1].strip("= ")
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)(.*)$", done.stdout, re.MULTILINE)
    text = summary + "".join(f"; {name}{why}" for name, why in failed)
    if done.returncode:
        for log in sorted(Path(folder).rglob("rank-*.log")):
            lines = log.read_text("utf-8", "replace").splitlines()[-LINES_OF_A_RANK:]
            print(f"== {log.relative_to(folder)}", *lines, sep="\n")
        raise RowFailed(text)
    return text


KINDS: dict[str, Callable[..., str]] = {
    f.__name__: f for f in (packages, device, collectives, verify, compare, train, account, test)
}


def run_row(kind: str, arguments: dict[str, Any], device: str, ranks: int) -> dict[str, str]:
    """Run a row and return result and figure; an unexpected error is a failed row with its traceback in the log."""
    with tempfile.TemporaryDirectory(prefix="unipar-gpu-", ignore_cleanup_errors=True) as folder:
        try:
            return {"result": "passed", "figure": KINDS[kind](device, ranks, folder, **arguments)}
        except RowFailed as e:
            return {"result": "failed", "figure": str(e)}
        except Exception as e:  # of any library
            traceback.print_exc()
            return {"result": "failed", "figure": f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"}


if __name__ == "__main__":
    _request = json.loads(sys.argv[1])
    _result = run_row(**_request)
    Path(sys.argv[2]).write_text(json.dumps(_result), encoding="utf-8")
    raise SystemExit(0 if _result["result"] == "passed" else 1)
