"""Time of a step beside other libraries' expert parallelism, on a Mixtral: `python -m benchmarks.experts_time`.

Two ranks train a Mixtral of transformers, whose experts they share: unipar, DeepSpeed's AutoEP, and transformers' own.
All of them run in the same two processes, step by step in turns, from the same weights on the same samples.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from benchmarks.loops import CLIP, DECAY, LR, adamw
from benchmarks.timing import Loop, interleaved, interval
from benchmarks.worlds import read_asked, run_world, write_found
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.backend.installed import library_versions
from unipar.config import SHARDS, Config, Shard
from unipar.distributed.place import Place
from unipar.training.setup import open_run
from unipar.utils.table import format_table

RANKS, MICRO, MICROS, WORDS, EXPERTS = 2, 2, 2, 512, 8
WIDTHS = (128, 256)
"""Widths of the models; a sample has half as many words."""

ROUNDS, WARM, END = 24, 3, 1_000_000
LIMIT = 1.0
"""Largest ratio of unipar's time of a step to that of the faster of the others."""

DIFFERENCE = 1e-4
"""Largest difference of the loss after the first steps."""


def sizes_of(width: int) -> dict[str, Any]:
    """Return the config of the model."""
    return {
        "vocab_size": WORDS,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": width // 2,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


class Mixtral(unipar.Task):
    """Next-word prediction by a small Mixtral, whose experts are multiplied by torch's grouped kernel."""

    def __init__(self, width: int) -> None:
        self.width = width

    @override
    def model(self) -> nn.Module:
        config: Any = transformers.MixtralConfig(**sizes_of(self.width))
        make: Any = transformers.MixtralForCausalLM
        return make._from_config(config, experts_implementation="grouped_mm", attn_implementation="sdpa")

    @override
    def data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(0, WORDS, (64, self.width // 2), generator=generator))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        (words,) = batch
        return model(input_ids=words, labels=words).loss


def config_of(shard: Shard) -> Config:
    """Return the config of both ranks: several microbatches in a step, nothing logged."""
    optimizer = {"name": "adamw", "lr": LR, "weight_decay": DECAY, "decay": "all"}
    return Config.model_validate(
        {
            "backend": "native",
            "device": "cpu",
            "parallel": {"data": RANKS, "expert": RANKS, "shard": shard},
            "batch": {"micro": MICRO, "accumulate": MICROS},
            "train": {"steps": END, "clip": CLIP, "optimizer": optimizer, "schedule": {"name": "constant"}},
            "log": {"every": END},
        }
    )


LossNow = Callable[[], float]
"""Function that returns the loss of the first microbatch, without training on it."""


def autoep(task: Mixtral, model: Any, micros: Sequence[Any], shard: Shard) -> tuple[Loop, LossNow]:
    """Return a step by DeepSpeed's AutoEP, set up as its guide has it, and torch's AdamW, which needs no compiler."""
    import deepspeed
    from transformers.utils import output_capturing

    def get(table: dict[str, Any], key: Any, default: Any = None) -> Any:  # AutoEP asks by the class's name
        return dict.get(table, key if isinstance(key, str) else str(key.__class__)) or default or {}

    type(output_capturing._CAN_RECORD_REGISTRY).get = get  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": SHARDS.index(shard)},
        "expert_parallel": {"enabled": True, "autoep_size": RANKS},
        "steps_per_print": None,
    }
    initialize: Any = deepspeed.initialize
    engine = initialize(model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False)[0]

    def step() -> None:
        for batch in micros:
            engine.backward(task.loss(engine, batch))
            engine.step()

    return step, lambda: task.loss(engine, micros[0]).item()


def of_transformers(task: Mixtral, folder: Path, micros: Sequence[Any]) -> tuple[Loop, LossNow]:
    """Return a step by transformers' expert parallelism, which is over FSDP2, with torch's AdamW.

    Its parameters lie on several meshes, which `clip_grad_norm_` refuses; the norm is that of all ranks' parts.
    """
    from transformers.distributed import DistributedConfig

    make: Any = transformers.MixtralForCausalLM
    split = DistributedConfig(tp_size=1, fsdp_size=RANKS, ep_size=RANKS)
    model = make.from_pretrained(
        folder, experts_implementation="grouped_mm", attn_implementation="sdpa", distributed_config=split
    ).train()
    optimizer = adamw(model)

    def local(t: Any) -> Tensor:
        return t.to_local() if hasattr(t, "to_local") else t

    def step() -> None:
        for batch in micros:
            (task.loss(model, batch) / len(micros)).backward()
        grads = [local(p.grad) for p in model.parameters()]
        square = torch.stack(torch._foreach_norm(grads)).square().sum()  # pyright: ignore[reportPrivateUsage]
        dist.all_reduce(square)
        torch._foreach_mul_(grads, (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateUsage]
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: task.loss(model, micros[0]).item()


def measure(place: Place, run: Path, control: socket.socket | None) -> None:
    """Measure the time of a step of each library in turns, and the loss after the first steps; entry of workers."""
    asked = read_asked(run)
    shard: Shard = asked["shard"]
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(place.rank)}  # DeepSpeed reads both
    config, task = config_of(shard), Mixtral(asked["width"])
    with open_run(settle(config, place.size), registry.find_backend("native"), task, place, run) as live:
        local_batch = next(live.batches())
        micros = [micro.batch for micro in local_batch.micros]
        torch.manual_seed(config.train.seed)
        model: Any = task.model()
        if place.rank == 0:
            model.save_pretrained(run / "weights")
        dist.barrier()

        def ours() -> None:
            before = live.done
            live.step(local_batch)
            live.seek(before)

        (part,) = live.parts.values()
        theirs = {
            "AutoEP": autoep(task, model, micros, shard),
            "transformers": of_transformers(task, run / "weights", micros),
        }
        loops: dict[str, Loop] = {"unipar": ours, **{name: loop for name, (loop, _) in theirs.items()}}
        for loop in loops.values():
            for _ in range(WARM):
                loop()
        losses = {"unipar": float(part.engine.evaluate(task.loss, micros[0]))}
        with torch.no_grad():
            losses |= {name: loss() for name, (_, loss) in theirs.items()}
        differing = {name: loss for name, loss in losses.items() if abs(loss - losses["unipar"]) > DIFFERENCE}
        assert not differing, losses
        dist.barrier()
        times = interleaved(loops, asked["rounds"], 1, time.perf_counter, dist.barrier)
        cpu = interleaved(loops, asked["rounds"], 1, time.process_time, dist.barrier)
        everything: list[Any] = [None] * place.size
        dist.all_gather_object(everything, {"times": times, "cpu": cpu, "losses": losses})
    if place.rank == 0:
        write_found(run, everything)


def of_ranks(ranks: Sequence[Mapping[str, Sequence[float]]], how: Callable[..., float]) -> dict[str, list[float]]:
    """Return one figure for each round from those of all ranks."""
    return {name: [how(t) for t in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}


def benchmark_experts(shards: Sequence[Shard] = ("optimizer", "parameters"), rounds: int = ROUNDS) -> tuple[Any, bool]:
    """Measure the ratio of unipar's step to that of each other library: wall clock, and CPU time of both ranks."""
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    good = True
    for width, shard in product(WIDTHS, shards):
        asked = {"width": width, "shard": shard, "rounds": rounds}
        ranks = run_world("benchmarks.experts_time:measure", RANKS, asked)
        times, cpu = (of_ranks([r[kind] for r in ranks], how) for kind, how in (("times", max), ("cpu", sum)))
        case = f"width {width}, native/{shard}+expert{RANKS}"
        found[case] = {}
        for name in ("AutoEP", "transformers"):
            wall, work = (
                interval([a / b for a, b in zip(each["unipar"], each[name], strict=True)]) for each in (times, cpu)
            )
            found[case][name] = {"wall": asdict(wall), "cpu": asdict(work)}
            good = good and wall.middle <= LIMIT
            milliseconds = (f"{statistics.median(times[each]) * 1e3:.0f}" for each in ("unipar", name))
            ratios = (f"{r.middle:.3f} [{r.low:.3f}..{r.high:.3f}]" for r in (wall, work))
            rows.append((case, name, *milliseconds, *ratios))
    header = ("two ranks, Mixtral", "beside", "unipar ms", "its ms", "unipar / its", "CPU time")
    print(format_table(header, rows, right=(2, 3)))
    print(f"{rounds} rounds; medians at most {LIMIT:.2f}: {'met' if good else 'MISSED'}\n")
    return {"rounds": rounds, "versions": library_versions(("torch", "transformers", "deepspeed")), **found}, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    return 0 if benchmark_experts(rounds=parser.parse_args().rounds)[1] else 1


if __name__ == "__main__":
    sys.exit(main())
