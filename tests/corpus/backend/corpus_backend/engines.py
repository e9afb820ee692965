"""The engine of each case, by name."""

from __future__ import annotations

from collections.abc import Callable

from unipar_mesh.engine import MeshEngine

from corpus_backend import adam, alive, clipping, experts, gradients, inputs, mesh, updates
from tests.support.healthy_engines import HealthyDDP
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World

ENGINES: dict[str, Callable[[Part, Config, World], Engine]] = {
    "none": HealthyDDP,
    "divided-again": gradients.DividedAgain,
    "times-accumulation": gradients.TimesAccumulation,
    "averaged-again": gradients.AveragedAgain,
    "discarded": gradients.Discarded,
    "reduced-before-last": gradients.ReducedBeforeLast,
    "mean-of-means": gradients.MeanOfMeans,
    "not-zeroed": gradients.NotZeroed,
    "same-samples": inputs.SameSamples,
    "split-twice": inputs.SplitTwice,
    "same-order": inputs.SameOrder,
    "bf16-table": inputs.Bf16Table,
    "more-digits": inputs.MoreDigits,
    "rate-ahead": updates.rate_ahead,
    "old-parameters": updates.OldParameters,
    "some-old-parameters": updates.SomeOldParameters,
    "decay-everything": updates.DecayEverything,
    "bf16-weights": updates.Bf16Weights,
    "own-start": updates.OwnStart,
    "muon-as-sgd": updates.MuonAsSGD,
    "muon-of-part": updates.MuonOfPart,
    "adam-is-adamw": adam.deepspeed_adam,
    "clip-inverted": clipping.ClipInverted,
    "clip-scaled": clipping.ClipScaled,
    "clip-per-group": clipping.ClipPerGroup,
    "replicas-counted": clipping.ReplicasCounted,
    "norm-of-shard": clipping.norm_of_shard,
    "bias-of-each-rank": mesh.bias_of_each_rank,
    "bias-gradient-divided": mesh.bias_gradient_divided,
    "norm-gradient-parts": mesh.norm_gradient_parts,
    "norms-drift": mesh.norms_drift,
    "tied-apart": mesh.tied_apart,
    "wiped": mesh.wiped,
    "generator-ahead": mesh.generator_ahead,
    "fsdp-of-one-rank": alive.fsdp_of_one_rank,
    "another-tag": alive.checkpoint_of_another_tag,
    "shard-scaled": gradients.ShardScaled,
    "doubled-each-time": gradients.DoubledEachTime,
    "accumulated-in-bf16": gradients.AccumulatedInBf16,
    "local-counts": gradients.LocalCounts,
    "step-ahead": updates.StepAhead,
    "uncorrected": updates.Uncorrected,
    "head-gradient-partial": mesh.head_gradient_partial,
    "attention-without-gradient": mesh.attention_without_gradient,
    "sequence-loss-times": mesh.sequence_loss_times,
    "sequence-loss-divided": mesh.sequence_loss_divided,
    "sequence-gradient-divided": mesh.sequence_gradient_divided,
    "norm-of-own-experts": experts.NormOfOwnExperts,
    "experts-summed": experts.ExpertsSummed,
    "router-apart": experts.RouterApart,
    "balance-times-accumulation": experts.BalanceTimesAccumulation,
    "balance-lost": experts.BalanceLost,
    "absent-slots": experts.AbsentSlots,
}


def build_case(name: str, part: Part, config: Config, world: World) -> Engine:
    """Return the engine of a case; without an error in a strategy whose ranks share the work, the native one."""
    if name == "none" and config.parallel.axes.ranks > 1:
        return MeshEngine(part, config, world)
    return ENGINES[name](part, config, world)
