"""Table of refusals: features that something cannot carry, each with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from unipar.config import Config
from unipar.utils.text import yaml_word

SCRIPT: Final = "script"
"""Carrier: a script that `unipar export` writes."""

ALL: Final = "all"
"""Carrier: everything that a backend trains."""

TRAITS: Final = ("whole_matrices", "moments_in_blocks", "moments_in_bf16")
"""Features that are traits of `OptimizerSettings`."""

OFFLOADED_ACTIVATIONS: Final = "model.offload: activations"
"""Condition: what autograd saves in blocks is kept in host memory."""

Refusals = Mapping[str, Mapping[str, tuple[str, str]]]
"""Reason and way out, by feature and by what cannot carry it; either may be empty.

Both are conditions of a config, such as a trait, a key that has an effect, or a key with its value. `{name}` and
`{value}` in a reason stand for the last words of the feature (capitalized) and of the carrier as sentences say them.
"""

_FP8_BY_HAND: Final = (
    "converts linear layers by torchao and finds those that leave fp8, which a script does not",
    "export with bf16-mixed, and call torchao.float8.convert_to_float8_training in train.py",
)
_LEAVE_ONE_OUT: Final = "leave one of them out"
_BY_HAND: Final = "export with adamw, and create yours in train.py"

REFUSALS: Refusals = {
    "whole_matrices": {
        "parallel.tensor": (
            "{name} updates each matrix as a whole, and each of {value} ranks has a part of it",
            "leave parallel.tensor out (parallel.shard: parameters splits between steps alone), or take adamw",
        ),
        "model.offload": ("its matrices are joined on the device", _LEAVE_ONE_OUT),
        SCRIPT: (
            "is unipar's own optimizer, which joins each matrix on one rank, and a script has torch.optim's",
            _BY_HAND,
        ),
    },
    "moments_in_blocks": {
        "parallel.tensor": (
            "its moments share a scale in blocks of elements of a row, and each of {value} ranks has a part of most "
            "blocks",
            "leave parallel.tensor out (parallel.shard: parameters splits between rows), or take adamw",
        ),
        "train.precision: fp64": ("torchao computes the update in fp32, with moments of 8 bits", "take adamw"),
        "train.local_steps": ("ranks average their moments, and codes of 8 bits have no mean", _LEAVE_ONE_OUT),
        "model.offload": (
            "moments that are in host memory take none of the device, in 8 bits or 32",
            _LEAVE_ONE_OUT,
        ),
        SCRIPT: (
            "runs torchao's update without compiling it, and keeps moments in blocks that fit every world, which a "
            "script's torchao.optim.AdamW8bit does not",
            _BY_HAND,
        ),
    },
    "moments_in_bf16": {
        "train.local_steps": (
            "ranks average their moments, and their mean would be rounded to the nearest bf16",
            _LEAVE_ONE_OUT,
        ),
        SCRIPT: (
            "is unipar's own optimizer, whose roundings are the same on every rank, and a script has torch.optim's",
            _BY_HAND,
        ),
    },
    "train.precision: fp8": {
        "parallel.context": (
            "one scale of a tensor covers all positions, and each of {value} ranks has a part of them",
            "take fp8-rowwise, with a scale for each position",
        ),
        SCRIPT: _FP8_BY_HAND,
    },
    "train.precision: fp8-rowwise": {SCRIPT: _FP8_BY_HAND},
}
"""Refusals of all backends, and of export. A backend has a table of its own beside this one."""

REFUSALS_OF_MODEL: Refusals = {
    OFFLOADED_ACTIVATIONS: {
        "model.recompute: selective": (
            "torch keeps results of its operations where autograd's hooks do not see them",
            "take recompute: blocks, whose inputs are moved",
        ),
        "model.compile: model": ("blocks do not run one by one", "say compile: blocks"),
    },
}
"""Refusals of all backends between keys of `model`."""


def conditions_of(config: Config) -> dict[str, str]:
    """Return conditions that a config meets, each with the words for it in a sentence."""
    parallel, model, train = config.parallel, config.model, config.train
    values = {
        "parallel.tensor": None if parallel.tensor == 1 else parallel.tensor,
        "parallel.context": None if parallel.context == 1 else parallel.context,
        "parallel.shard": None if parallel.shard == "nothing" else parallel.shard,
        "parallel.shard_over": parallel.shard_over,
        "parallel.sequence": parallel.sequence or None,
        "train.precision": train.precision,
        "train.local_steps": train.local_steps,
        "model.offload": None if model.offloaded_state == "none" else model.offloaded_state,
        "model.sync_batchnorm": model.sync_batchnorm or None,
        "model.recompute": model.recomputes,
        "model.compile": model.compiling and model.compiling.what,
    }
    keys = {key: f"{key}: {yaml_word(value)}" for key, value in values.items() if value is not None}
    traits = {
        trait: f"{key}.name: {its.name}"
        for key, its in reversed([*train.optimizers.items()])  # the first that has a trait stays
        for trait in TRAITS
        if getattr(its, trait)
    }
    plain = {"model.compile": "model.compile"} if "model.compile" in keys else {}  # its value may be a section
    if model.offloads_activations:
        plain[OFFLOADED_ACTIVATIONS] = OFFLOADED_ACTIVATIONS
    return {**traits, **keys, **{words: words for words in keys.values()}, **plain}


def refusals_met(conditions: Mapping[str, str], table: Refusals = REFUSALS) -> Iterator[str]:
    """Yield the sentence of each refusal in `table` whose feature and carrier are among these conditions."""
    for feature in (one for one in table if one in conditions):
        what = conditions[feature]
        for carrier, (reason, way_out) in table[feature].items():
            if carrier not in conditions:
                continue
            if carrier == SCRIPT:
                yield f"{what} {reason}: {way_out}"
                continue
            place = conditions[carrier] and f" with {conditions[carrier]}"
            name, value = (words.rpartition(" ")[2] for words in (what, place))
            why = reason and f": {reason.format(name=name.capitalize(), value=value)}"
            yield f"{what} is not available{place}{why}{way_out and f'; {way_out}'}"
