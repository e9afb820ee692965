"""What a strategy does not do, and why: data, so that a stranger's backend brings its own.

notimpl: unipar could, and does not yet. notyet: the library must first. never: contrary to what the strategy is.
Every mark is strict: a strategy that does what its mark denies fails the suite.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from unipar.config import Strategy


@dataclass(frozen=True)
class Mark:
    kind: Literal["notimpl", "notyet", "never"]
    strategies: Sequence[str]
    """Strategies or patterns: `deepspeed/*`."""

    cases: Sequence[str]
    """Cases or patterns."""

    raises: str
    """The error's name."""

    reason: str
    sizes: Sequence[int] = field(default=(1, 2, 4))

    def fits(self, strategy: Strategy, case: str, size: int) -> bool:
        named = any(fnmatchcase(str(strategy), pattern) for pattern in self.strategies)
        return named and any(fnmatchcase(case, pattern) for pattern in self.cases) and size in self.sizes


ZERO = ("deepspeed/optimizer*", "deepspeed/gradients*", "deepspeed/parameters*", "accelerate/*+zero")
FSDP2 = ("native/gradients", "native/parameters", "accelerate/gradients", "accelerate/parameters")

PIPELINES = ("native/*+pipeline*", "native/*+tensor*+pipeline*")
FIXED_SHAPES = ("native/*+interleaved", "native/*+zerobubble")
EXPERTS, EXPERTS_OF_DEEPSPEED = "native/*+expert*", "deepspeed/*+expert*"
AXES = (*PIPELINES, "native/*+tensor*", "native/*+context*", EXPERTS)
TENSOR = ("native/*+tensor*", "deepspeed/*+tensor*", "accelerate/*+tensor*")

MARKS = (
    Mark("never", TENSOR, ("muon*",), "Unsupported", "each rank has a part of each matrix"),
    Mark("never", TENSOR, ("moments of 8 bits*",), "Unsupported", "each rank has a part of most blocks"),
    Mark("never", TENSOR, ("whole matrices*",), "TaskError", "each rank has a part of each matrix"),
    Mark("never", (EXPERTS, EXPERTS_OF_DEEPSPEED), ("generation by the whole model", "convolution", "one parameter"),
         "TaskError", "its model has no experts"),
    Mark("never", (EXPERTS_OF_DEEPSPEED,), ("muon*",), "Unsupported",
         "AutoEP keeps each gate_up_proj as two parameters, whose matrices are halves"),
    Mark("notimpl", (EXPERTS_OF_DEEPSPEED,), ("moments in bf16*", "*compiled"), "Unsupported",
         "no such run of DeepSpeed's AutoEP has been compared with one process"),
    Mark("notimpl", (EXPERTS_OF_DEEPSPEED,), ("whole matrices*",), "TaskError",
         "no such run of DeepSpeed's AutoEP has been compared with one process"),
    Mark("notyet", (EXPERTS,), ("scalar parameter",), "TaskError",
         "FSDP2 does not take parameters without dimensions"),
    Mark("notimpl", (EXPERTS,), ("two machines",), "Unsupported",
         "experts are sharded over the ranks that have the same ones, wherever these are"),
    Mark("never", PIPELINES, ("three forwards", "frozen teacher", "averaged beside a frozen teacher"), "TaskError",
         "a stage runs its blocks once in each loss"),
    Mark("never", ("native/*+context*",), ("contrastive", "contrastive, fp64", "contrastive, bf16-mixed"), "TaskError",
         "two towers cut two sequences, and a pass has one"),
    Mark("never", PIPELINES, ("several losses",), "TaskError", "stages are cut for the task's own loss"),
    Mark("never", PIPELINES, ("shared lists",), "TaskError",
         "what a block leaves for the loss to read is on that block's stage"),
    Mark("notyet", FIXED_SHAPES, ("ragged last batch", "token weights, ragged", "a stream", "batches by tokens*",
          "contrastive, ragged"), "Unsupported",
         "torch's schedules receive tensors of one shape"),
    Mark("notyet", ("native/*+zerobubble",), ("all but matrix products recomputed",), "Unsupported",
         "torch allows one backward through what is recomputed selectively, and zerobubble runs two"),
    Mark("notyet", ("native/*+zerobubble",), ("blocks compiled", "blocks recomputed and compiled"), "Unsupported",
         "torch does not split the backward of what is compiled"),
    Mark("notyet", ("native/nothing+pipeline2*", "native/nothing+tensor2", "native/*+sequence", "native/parameters+*"),
         ("scalar parameter",), "TaskError",
         "FSDP2 does not take parameters without dimensions", sizes=(4,)),
    Mark("never", (*AXES, "deepspeed/*+tensor*"), ("generation by the whole model",), "TaskError",
         "blocks are split in place, so that no rank can have the whole model"),
    Mark("never", AXES, ("one parameter",), "TaskError", "a mesh splits blocks"),
    Mark("never", AXES, ("several parts", "several parts, *[!r]"), "TaskError", "a mesh splits one model"),
    Mark("never", ("deepspeed/*+tensor*", EXPERTS_OF_DEEPSPEED), ("several parts", "several parts, *[!r4]"),
         "TaskError", "a mesh splits one model"),
    Mark("never", ("deepspeed/nothing+tensor*",), ("several parts, fp64",), "TaskError", "a mesh splits one model"),
    Mark("never", AXES, ("*bf16-master*",), "Unsupported",
         "the mesh has no fp32 masters beside bf16 parameters"),
    Mark("never", ("native/*+tensor*", "deepspeed/*+tensor*"), ("convolution",), "TaskError",
         "only matrices of linear layers are cut"),
    Mark("never", ("native/*+tensor*", "deepspeed/*+tensor*"), ("block read in the loss",), "TaskError",
         "what reads a matrix outside of its block's forward sees a part of it"),
    Mark("never", ("native/*+context*",), ("convolution",), "TaskError", "its hidden states have no sequence"),
    Mark("notyet", ("native/*+context*",), ("scalar parameter",), "TaskError",
         "FSDP2 does not take parameters without dimensions"),
    Mark("never", ("native/*+context*", "native/*+sequence"), ("shared lists",), "TaskError",
         "what a block leaves for the loss to read is a part of the sequence"),
    Mark("notyet", ("deepspeed/*+tensor*",), ("model compiled",), "Unsupported",
         "torch cannot compile AutoTP's layers"),
    Mark("never", PIPELINES, ("model compiled",), "Unsupported", "a stage leaves the model in the middle"),
    Mark("notimpl", ("native/*+tensor*", "native/*+context*", EXPERTS), ("*compiled",), "Unsupported",
         "calls inside blocks are changed, which a compiled block does not see"),
    Mark("never", ("native/parameters", "native/parameters+expert*", "accelerate/parameters"),
         ("block read in the loss",), "TaskError", "FSDP2 gathers a block's parameters for that block's forward alone"),
    Mark("notyet", (*FSDP2, "deepspeed/*", "accelerate/*+zero"), ("scalar parameter",), "TaskError",
         "FSDP2 and DeepSpeed do not take parameters without dimensions"),
    Mark("never", ("native/nothing", "native/optimizer", "accelerate/nothing"), ("unused at times, unsaid",),
         "TaskError", "DDP must be told to search for unused parameters: options.NAME.find_unused_parameters"),
    Mark("never", ("native/nothing+dp",), ("*",), "Unsupported",
         "nn.DataParallel is for CUDA devices, and the suite plays on the CPU; tests/backends/test_gpu.py has it"),
    Mark("never", ZERO, ("fp64", "several parts, fp64", "averaged, fp64", "contrastive, fp64", "muon, fp64"),
         "Unsupported", "ZeRO's masters are fp32"),
    Mark("never", ("single", "native/nothing", "horovod/*", "accelerate/nothing"),
         ("bf16-master", "bf16-master, float inputs", "state out and in, bf16-master",
          "several parts, bf16-master", "averaged, bf16-master", "contrastive, bf16-master", "muon, bf16-master",
          "moments in bf16, bf16-master"),
         "Unsupported",
         "one copy of the parameters: no fp32 master beside bf16 ones"),
    Mark("notimpl", ("deepspeed/*+tensor*", EXPERTS_OF_DEEPSPEED), ("*bf16-master*",), "Unsupported",
         "the proof compares with an fp32 model, and DeepSpeed keeps bf16 parameters"),
    Mark("never", (*FSDP2, "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters", "accelerate/*+zero",
                   EXPERTS, EXPERTS_OF_DEEPSPEED), ("unused on one rank",), "WorkerFailed",
         "ranks that reduce different gradients cannot meet; compute it everywhere times 0.0", sizes=(2,)),
)  # fmt: skip


def read_marks(file: Path) -> list[Mark]:
    """A stranger's marks: [[mark]] tables with the same keys."""
    return [Mark(**row) for row in tomllib.loads(file.read_text("utf-8"))["mark"]]
