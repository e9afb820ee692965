"""The cases that every strategy must pass, or be marked for: a task, a config, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import unipar
from tests.conformance import tasks
from tests.conformance.apart import Apart
from tests.conformance.chain import Chain
from tests.conformance.contrastive import OneTower, Pairs
from tests.conformance.eight_bits import Wide
from tests.conformance.gan import Gan
from tests.conformance.generation import Generating
from tests.conformance.lengths import Counted, LateTokens, Picked
from tests.conformance.matrix_task import WholeMatrices
from tests.conformance.narrow import Adapted
from tests.conformance.rates import Paced
from tests.conformance.scores import Scored
from tests.conformance.tolerances import BF16, CHAIN, FP32, FP64, GPT2, NARROW_MOMENTS, OWN_NORMS, Tolerance
from unipar.backend.offered_strategies import config_in_strategy
from unipar.config import Config, Precision, Strategy
from unipar.data.order import SampleOrder

TOTAL, STEPS = 16, 6
FILE = Path(__file__).parent / "weights.safetensors"
SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    name: str
    task: Callable[[], unipar.Task]
    accumulate: int = 2
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a task of several parts."""

    precision: Precision = "fp32"
    train: Mapping[str, Any] = field(default_factory=dict[str, Any])
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further sections of the config."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    micro: bool = False
    """Held against one process that works through the same microbatches, with the same random numbers."""

    sizes: tuple[int, ...] = SIZES
    tolerance: Tolerance = FP32
    machines: str = ""
    """Machine of each rank, as if there were several: `abab` are two, whose ranks come in turn."""

    hop: int | None = None
    """After this step the state moves into a new engine."""

    apart: bool = False
    """Runs in a world of its own, with its own timeout, which may die."""

    local: bool = False
    """Held against ranks that train by themselves and take their mean."""

    error: str = ""
    """The NonFinite message that every rank must raise."""

    strategies: tuple[str, ...] = ("*",)
    """Where it is played, if not everywhere."""

    axes: bool = True
    """Played in strategies with axes of the mesh too: not if its loss counts its own calls, of which there are more."""

    @property
    def averaged(self) -> bool:
        return "ema" in self.train

    @property
    def several(self) -> bool:
        return self.name.startswith("several parts")

    @property
    def through(self) -> bool:
        return self.name.startswith("several parts, one loss")

    def on(self, strategy: Strategy) -> bool:
        """Return whether it is played in this strategy."""
        return (self.axes or not strategy.axes.split) and any(
            fnmatchcase(str(strategy), pattern) for pattern in self.strategies
        )

    def config(self, strategy: Strategy, size: int) -> Config:
        accumulate = 1 if self.accumulate == 1 else self.accumulate
        batch = {"total": TOTAL, "micro": TOTAL // (accumulate * size)}
        # eps: single elements whose gradient is near zero are else moved by rounding noise, a lr at a time
        optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
        train: dict[str, Any] = {"optimizer": optimizer, "clip": 0.3, "precision": self.precision} | dict(self.train)
        train.setdefault("consistency_check", {"every": 3})
        if "epochs" not in train:
            train["steps"] = STEPS
        options = {k: dict(v) for k, v in self.options.items()}
        made: dict[str, Any] = {"device": "cpu", "batch": batch, "train": train, "log": {"every": 2}}
        made |= {"launch": {"heartbeat": 15.0, "timeout": 20.0}, "options": options} | dict(self.more)
        # 64 samples fill all batches, so that nothing is left out
        free = "ragged" in self.name or "tokens" in made["batch"] or self.task is tasks.Streamed
        if strategy.axes.pieces > 1 and not free:
            made["data"] = {"last_batch": "drop"} | made.get("data", {})
        made["parallel"] = {"data": size, "shard": strategy.shard} | made.get("parallel", {})
        return config_in_strategy(Config.model_validate(made), strategy)


def _poison() -> int:
    """A sample of the fourth step's global batch: its last, so that the last rank has it."""
    order = SampleOrder(64, TOTAL, 0, shuffle=True, last_batch="keep")
    batches = order.batches(3)
    return next(batches)[1][-1]


_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
_NOT_FINITE = "the loss is not finite at step 4, first on rank "
_COSINE = {"schedule": {"name": "cosine", "warmup": 2, "min_lr_ratio": 0.1}}
_RMSPROP = {"optimizer": {"name": "rmsprop", "lr": 1e-3, "weight_decay": 0.1, "alpha": 0.9, "eps": 1e-4,
                          "momentum": 0.5, "centered": True}}  # fmt: skip
_MUON = {"optimizer": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "adamw": {"eps": 1e-6}}}
_EIGHT_BITS = {"optimizer": {"name": "adamw-8bit", "block": 16, "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}}
_BF16_MOMENTS = {"optimizer": {"name": "adamw-bf16", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}}
_EXACT = {
    "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6, "fused": False, "foreach": False},
    "clip": {"max": 0.3, "norm": "fp64"},
}


def _compiled(what: str) -> dict[str, Any]:
    """By a backend that traces as the default does, and compiles nothing to machine code."""
    return {"model": {"compile": {"what": what, "backend": "aot_eager"}}, "eval": {"every": 2}}


_TOKENS: dict[str, Any] = {"batch": {"tokens": 70, "max_length": 8, "micro": 20}}
_AVERAGED = {"ema": {"decay": 0.8, "warmup": 3}}
_TWO_COPIES = {"parallel": {"shard_over": 2}}
_BY_MACHINE = {"parallel": {"shard_over": "machine"}}
_WHOLE = ("single", "native/*", "horovod/*", "deepspeed/*", "accelerate/*")
_BLOCKS = (
    "single",
    "native/*",
    "horovod/*",
    "accelerate/nothing",
    "accelerate/optimizer",
    "accelerate/gradients",
    "accelerate/parameters",
)
_STRATEGIES_WITH_COPIES = ("native/optimizer", "native/gradients", "native/parameters", "native/parameters+expert2")
_FIND_UNUSED = {"native": {"find_unused_parameters": True}, "accelerate": {"find_unused_parameters": True}}


_CHAIN: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6},
    "clip": 0.1,
    "parts": {"middle": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}},
}


def _cases_of_several_parts() -> list[Case]:
    """A GAN: the critic steps with every share, the generator with every second."""
    optimizers: dict[str, Any] = {
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6},
        "clip": 0.01,
        "parts": {"critic": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "clip": 0.1}},
    }
    gan: dict[str, Any] = {"train": _COSINE | optimizers}
    loose: dict[str, Any] = {"norm": True, "dropout": 0.2}
    return [
        Case("several parts", Gan, **gan),
        Case(
            "several parts, every parameter split",
            Gan,
            sizes=(2,),
            strategies=("deepspeed/parameters",),
            options={"deepspeed": {"persistence": 0}},
            **gan,
        ),
        Case("several parts, batch norm, dropout", lambda: Gan(**loose), kwargs=loose, micro=True, sizes=(2,), **gan),
        Case("several parts, state out and in", Gan, hop=3, sizes=(2,), **gan),
        Case("several parts, fp64", Gan, precision="fp64", tolerance=FP64, sizes=(2,), **gan),
        Case("several parts, bf16-mixed", Gan, precision="bf16-mixed", tolerance=BF16, sizes=(2,), **gan),
        Case("several parts, bf16-master", Gan, precision="bf16-master", tolerance=BF16, sizes=(2,), **gan),
        Case("several parts, one loss", Chain, train=_CHAIN, tolerance=CHAIN, sizes=(1, 2)),
        Case(
            "several parts, one loss, dropout",
            lambda: Chain(**loose),
            kwargs=loose,
            micro=True,
            sizes=(2,),
            train=_CHAIN,
            tolerance=CHAIN,
        ),
        Case("several parts, averaged", Gan, hop=3, sizes=(2,), train=gan["train"] | _AVERAGED),
    ]


CASES = {
    case.name: case
    for case in (
        Case("one microbatch", tasks.Plain, accumulate=1),
        Case("four microbatches", tasks.Plain, accumulate=4),
        Case("schedule", tasks.Plain, train=_COSINE),
        Case("warm-up, stable, decay", tasks.Plain, train={"schedule": {"name": "wsd", "warmup": 2, "decay": 3}}),
        Case("a schedule of its own", Paced, sizes=(2,)),
        Case("no clip, sgd", tasks.Plain, train={"clip": None, "optimizer": _SGD}),
        Case("adam, no decay on thin ones", tasks.Plain,
             train={"optimizer": {"name": "adam", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6, "decay": "matrices"}}),
        Case("two groups", tasks.Grouped, train=_COSINE),
        Case("an optimizer of its own", tasks.Owning, train=_COSINE | {"optimizer": {"lr": 1e-3}}, hop=3, sizes=(2,)),
        Case("muon", tasks.Plain, train=_COSINE | _MUON, hop=3, sizes=(1, 2), strategies=_WHOLE),
        Case("muon, fp64", tasks.Grouped, precision="fp64", tolerance=FP64, train=_MUON, sizes=(2,), strategies=_WHOLE),
        Case("muon, bits", tasks.Plain, accumulate=1, sizes=(2,), train=_EXACT | {"optimizer": _MUON["optimizer"] | {
             "fused": False, "foreach": False}}, strategies=_WHOLE),
        Case("muon, bf16-master", tasks.Grouped, precision="bf16-master", tolerance=BF16, train=_MUON, hop=3,
             sizes=(2,), strategies=_WHOLE),
        Case("muon, copies", tasks.Grouped, more=_TWO_COPIES, train=_MUON, hop=3, sizes=(4,),
             strategies=_STRATEGIES_WITH_COPIES),
        Case("whole matrices of its own", WholeMatrices, train=_COSINE | {"optimizer": {"lr": 1e-3}}, hop=3, sizes=(2,),
             strategies=_WHOLE),
        Case("moments of 8 bits", Wide, train=_COSINE | _EIGHT_BITS, hop=3, sizes=(1, 2), strategies=_BLOCKS,
             tolerance=NARROW_MOMENTS),
        Case("moments of 8 bits, bits", Wide, accumulate=1, sizes=(2,), strategies=_BLOCKS, tolerance=NARROW_MOMENTS,
             train=_EIGHT_BITS | {"clip": _EXACT["clip"]}),
        Case("moments in bf16", tasks.Grouped, train=_COSINE | _BF16_MOMENTS, hop=3, sizes=(1, 2),
             tolerance=NARROW_MOMENTS),
        Case("moments in bf16, bits", tasks.Grouped, accumulate=1, sizes=(2,), tolerance=NARROW_MOMENTS,
             train=_EXACT | {"optimizer": _BF16_MOMENTS["optimizer"] | {"fused": False, "foreach": False}}),
        Case("moments in bf16, bf16-master", tasks.Grouped, precision="bf16-master", tolerance=BF16, hop=3, sizes=(2,),
             train=_BF16_MOMENTS),
        Case("moments in bf16, copies", tasks.Grouped, more=_TWO_COPIES, train=_BF16_MOMENTS, hop=3, sizes=(4,),
             tolerance=NARROW_MOMENTS, strategies=_STRATEGIES_WITH_COPIES),
        Case("frozen teacher", tasks.Distilled, more={"eval": {"every": 2}}),
        Case("narrow frozen weights", Adapted, hop=3, sizes=(2,)),
        Case("tied weights", lambda: tasks.Plain(tied=True)),
        Case("ragged last batch", lambda: tasks.Plain(count=33), train={"epochs": 2}),
        Case("ragged dropped", lambda: tasks.Plain(count=37), train={"epochs": 3},
             more={"data": {"last_batch": "drop"}}),
        Case("token weights", tasks.Tokens, accumulate=4),
        Case("token weights, ragged", lambda: tasks.Tokens(count=35), train={"epochs": 2}),
        Case("batches by tokens", Counted, more=_TOKENS | {"eval": {"every": 2, "batches": 2}}),
        Case("batches by tokens, two on each rank", LateTokens, more={"batch": {"tokens": 60, "accumulate": 2}}),
        Case("batches by tokens, a sampler of its own", Picked, more=_TOKENS, sizes=(2,)),
        Case("batches by tokens, packed", Counted, sizes=(2,),
             more={"batch": {"tokens": 60, "micro": 16, "rows": "packed"}}),
        Case("method in the loss", tasks.Reaching),
        Case("block read in the loss", tasks.BlockReading),
        Case("three forwards", tasks.Thrice),
        Case("shared lists", tasks.Sharing),
        Case("unused", tasks.Unused),
        Case("unused at times", tasks.AtTimes, accumulate=1, options=_FIND_UNUSED, axes=False),
        Case("unused at times, unsaid", tasks.AtTimes, accumulate=1, axes=False),
        Case("unused on one rank", tasks.OneRank, accumulate=1, options=_FIND_UNUSED, micro=True, sizes=(2,),
             apart=True, more={"launch": {"heartbeat": 6.0, "timeout": 8.0}}),  # elsewhere ranks wait in vain
        Case("scalar parameter", tasks.Scalar),
        Case("one parameter", tasks.OneWeight, hop=3, sizes=(4,), strategies=("native/*",)),
        Case("batch norm", tasks.Normed, micro=True),
        Case("dropout", lambda: tasks.Plain(dropout=0.3), micro=True),
        Case("dropout, from eval mode", lambda: tasks.Pretrained(dropout=0.3), micro=True, hop=3, sizes=(2,),
             more={"eval": {"every": 2}}),
        Case("random transforms", tasks.Transformed),
        Case("data workers", tasks.Loaded, sizes=(2,)),
        Case("scores of all samples", Scored, more={"eval": {"every": 2}}),
        Case("generation by the whole model", Generating, tolerance=GPT2),
        Case("evaluation in the middle", tasks.Plain, more={"eval": {"every": 2, "batches": 2}}),
        Case("a stream", tasks.Streamed, sizes=(2,)),
        Case("weights from a file", tasks.Plain, sizes=(2,), tolerance=Tolerance(2e-6, 2e-6, 2e-5),
             more={"model": {"weights": {"file": str(FILE), "only": ["embed.*", "head.*"]}}}),
        Case("convolution", tasks.Regression, train={"optimizer": {"name": "adamw", "lr": 3e-3}}),
        Case("state out and in", tasks.Grouped, train=_COSINE, hop=3),
        Case("averaged", tasks.Grouped, train=_COSINE | _AVERAGED, hop=3, more={"eval": {"every": 2}}),
        Case("averaged every second step", lambda: tasks.Plain(tied=True), sizes=(2,), more={"eval": {"every": 2}},
             train={"ema": {"decay": 0.6, "every": 2}}),
        Case("averaged, batch norm", tasks.Normed, micro=True, sizes=(2,), train=_AVERAGED),
        Case("averaged beside a frozen teacher", tasks.Distilled, sizes=(2,), train=_AVERAGED,
             more={"eval": {"every": 2}}),
        Case("averaged, fp64", tasks.Grouped, precision="fp64", tolerance=FP64, sizes=(2,), train=_AVERAGED),
        Case("averaged, bf16-mixed", tasks.Plain, precision="bf16-mixed", tolerance=BF16, sizes=(2,), train=_AVERAGED),
        Case("averaged, bf16-master", tasks.Grouped, precision="bf16-master", tolerance=BF16, sizes=(2,), hop=3,
             train=_AVERAGED),
        Case("state out and in, bf16-master", tasks.Grouped, precision="bf16-master", hop=3, tolerance=BF16,
             sizes=(2,)),
        Case("blocks recomputed", lambda: tasks.Plain(dropout=0.3), micro=True,
             more={"model": {"recompute": "blocks"}}, sizes=(2,)),
        Case("all but matrix products recomputed", tasks.Grouped, more={"model": {"recompute": "selective"}},
             sizes=(2,)),
        Case("blocks compiled", tasks.Plain, more=_compiled("blocks"), sizes=(2,)),
        Case("model compiled", tasks.Plain, more=_compiled("model"), sizes=(2,)),
        Case("blocks recomputed and compiled", tasks.Plain, sizes=(2,),
             more={"model": {"recompute": "blocks", **_compiled("blocks")["model"]}}),
        Case("local steps", tasks.Plain, train={"local_steps": 4}, sizes=(2,),
             strategies=("native/nothing",), local=True),
        Case("local steps, one at a time", tasks.Plain, train={"local_steps": 1, "clip": None, "optimizer": _SGD},
             sizes=(2,), strategies=("native/nothing",), tolerance=OWN_NORMS),
        Case("two copies", tasks.Grouped, more=_TWO_COPIES, train=_COSINE, hop=3, sizes=(4,),
             strategies=_STRATEGIES_WITH_COPIES),
        Case("two copies, fp64 norm", tasks.Grouped, more=_TWO_COPIES | {"eval": {"every": 2}}, train=_EXACT,
             sizes=(4,), strategies=_STRATEGIES_WITH_COPIES),
        Case("two machines", tasks.Grouped, more=_BY_MACHINE, machines="abab", train=_COSINE, hop=3, sizes=(4,),
             strategies=_STRATEGIES_WITH_COPIES),
        Case("several losses", lambda: Apart(dropout=0.2), micro=True, sizes=(1, 2)),
        Case("contrastive", Pairs, more={"eval": {"every": 2}}),
        Case("contrastive, one tower", lambda: OneTower(dropout=0.2), micro=True, hop=3),
        Case("contrastive, ragged", lambda: OneTower(count=35), train={"epochs": 2}, sizes=(2, 4),
             tolerance=Tolerance(2e-6, 2e-6, 2e-5)),
        Case("contrastive, fp64", Pairs, precision="fp64", tolerance=FP64, sizes=(2,), accumulate=4),
        Case("contrastive, bf16-mixed", Pairs, precision="bf16-mixed", tolerance=Tolerance(1e-2, 2e-2, None),
             sizes=(2,)),  # the sum of two losses
        Case("contrastive, bf16-master", Pairs, precision="bf16-master", tolerance=Tolerance(1.5e-2, 2e-2, None),
             sizes=(2,)),
        *_cases_of_several_parts(),
        Case("fp64", tasks.Grouped, precision="fp64", tolerance=FP64),
        Case("bf16-mixed", tasks.Plain, precision="bf16-mixed", tolerance=BF16),
        Case("bf16-master", tasks.Grouped, precision="bf16-master", tolerance=BF16),
        Case("bf16-master, float inputs", tasks.Regression, precision="bf16-master", tolerance=BF16, sizes=(2,)),
        Case("not a number", lambda: tasks.Poisoned(_poison()), error=_NOT_FINITE),
        Case("bits, one microbatch", tasks.Grouped, accumulate=1, train=_EXACT, sizes=(2,)),
        Case("bits, four microbatches", tasks.Grouped, accumulate=4, train=_EXACT, sizes=(2,)),
        Case("rmsprop", tasks.Grouped, train=_COSINE | _RMSPROP, hop=3, sizes=(1, 2)),
    )
}  # fmt: skip

MAIN_CASES = (
    "four microbatches", "two groups", "ragged last batch", "token weights, ragged", "method in the loss", "unused",
    "several parts",
    "batch norm", "evaluation in the middle", "scores of all samples",
    "state out and in", "averaged", "bf16-mixed", "bf16-master",
    "not a number",
    "bits, one microbatch", "bits, four microbatches", "weights from a file", "blocks recomputed",
)  # fmt: skip
SHORT_CASES = (
    "four microbatches", "token weights, ragged", "several parts", "state out and in", "bf16-master",
    "batches by tokens",
)  # fmt: skip

EVERYWHERE = ("four microbatches", "state out and in")
VARIANTS = (
    "warm-up, stable, decay", "a schedule of its own", "muon, fp64", "whole matrices of its own",
    "narrow frozen weights", "batches by tokens, two on each rank", "batches by tokens, a sampler of its own",
    "batches by tokens, packed", "averaged every second step", "averaged, batch norm",
    "averaged beside a frozen teacher", "averaged, fp64", "averaged, bf16-mixed", "averaged, bf16-master",
    "all but matrix products recomputed", "contrastive, ragged", "contrastive, fp64", "contrastive, bf16-mixed",
    "contrastive, bf16-master", "several parts, batch norm, dropout", "several parts, fp64",
    "several parts, bf16-mixed", "several parts, bf16-master", "several parts, averaged", "bf16-master, float inputs",
    "muon, bf16-master", "moments in bf16, bits", "moments in bf16, bf16-master", "several parts, one loss, dropout",
)  # fmt: skip
"""Cases that `make test` plays under one library, by turns, as each plays their main form."""

BITS = ("bits, one microbatch", "bits, four microbatches")

MESH_STRATEGIES = (
    "native/nothing+pipeline2", "native/nothing+tensor2", "native/nothing+context2", "native/parameters+pipeline2",
    "native/parameters+tensor2", "native/nothing+tensor2+pipeline2+gpipe", "native/nothing+pipeline2+interleaved",
    "native/nothing+pipeline2+zerobubble", "deepspeed/nothing+tensor2", "deepspeed/gradients+tensor2",
    "deepspeed/parameters+tensor2", "native/nothing+tensor2+sequence",
    "native/nothing+expert2", "deepspeed/optimizer+expert2", "native/parameters+expert2",
    "native/nothing+tensor2+expert2", "native/optimizer+expert2", "native/nothing+expert4",
    "native/parameters+expert4", "native/nothing+pipeline2+expert2",
)  # fmt: skip
"""Strategies with axes of the mesh, whose sizes are open, that the suite plays."""

WHOLE_ALONE = MESH_STRATEGIES[-4:]
"""Those of them that only `make conformance` plays."""

MESH_CASES = (
    "four microbatches", "two groups", "tied weights", "ragged last batch", "token weights, ragged", "unused",
    "dropout", "evaluation in the middle", "scores of all samples",
    "state out and in", "averaged", "averaged every second step",
    "blocks recomputed", "bf16-mixed", "fp64", "not a number",
    "batches by tokens", "batches by tokens, two on each rank", "contrastive", "contrastive, one tower", "muon",
    "whole matrices of its own", "rmsprop", "weights from a file",
)  # fmt: skip
"""Cases that `make test` plays in one of the first three of them, in the smallest world; a few also in the others."""

EXPERT_CASES = {
    "native/nothing+expert2": (
        "frozen teacher", "blocks recomputed", "bf16-mixed", "fp64", "averaged", "evaluation in the middle",
    ),
}  # fmt: skip
"""Cases that `make test` plays in a strategy of experts, besides those of each strategy with axes."""

MESH_EVERYWHERE = (*EVERYWHERE, "token weights, ragged", "muon")

SIZES_ONLY_VARIANT = "library"
"""A variant that only sets sizes."""

THIN = ("native/parameters", "deepspeed/parameters", "horovod/nothing", "accelerate/gradients")
"""Strategies that `make test` plays in worlds of 1, too."""

COMPILED = {
    "native/parameters": ("model compiled", "blocks recomputed and compiled"),
    "horovod/nothing": ("blocks compiled",),
}
"""Strategies in which `make test` compiles, and what: a case takes as long as ten others, a whole model as twenty."""

OURS = ("single", "native", "deepspeed", "horovod", "accelerate")


def blocks_for(strategy: Strategy) -> int:
    """Return how many blocks the models have in a strategy: as many as its stages, and at least two."""
    return max(2, strategy.axes.stages)


def experts_for(strategy: Strategy) -> int:
    """Return how many experts each block of the models has in a strategy."""
    return 4 if strategy.axes.expert > 1 else 0


def dtype_of(case: Case) -> torch.dtype:
    return torch.float64 if case.precision == "fp64" else torch.float32
