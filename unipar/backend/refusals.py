"""Table of refusals: what cannot carry a trait of an optimizer, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from unipar.config import Config

SCRIPT: Final = "script"
"""Carrier: a script that `unipar export` writes."""

ALL: Final = "all"
"""Carrier: everything that a backend trains."""

Trait = Literal["whole_matrices", "moments_in_blocks", "moments_in_bf16"]
"""Trait of `OptimizerSettings`."""

Refusals = Mapping[Trait, Mapping[str, tuple[str, str]]]
"""Reason and way out, by the trait and by what cannot carry it: a key of the config, SCRIPT or ALL.

`{name}` and `{value}` in a reason are filled in: the optimizer's name, capitalized, and the value of the key.
"""

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
        "train.precision": ("torchao computes the update in fp32, with moments of 8 bits", "take adamw"),
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
}
"""Refusals of all backends, and of export. A backend has a table of its own beside this one."""


def keys_in_use(config: Config) -> dict[str, object]:
    """Return the values of keys that some optimizer or backend refuses, without values that none refuses."""
    tensor, offload, precision = config.parallel.tensor, config.model.offload, config.train.precision
    values = {
        "parallel.tensor": None if tensor == 1 else tensor,
        "parallel.shard_over": config.parallel.shard_over,
        "train.precision": precision if precision == "fp64" else None,
        "train.local_steps": config.train.local_steps,
        "model.offload": None if offload == "none" else offload,
    }
    return {key: value for key, value in values.items() if value is not None}


def refuse_optimizers(config: Config, carriers: Mapping[str, object], table: Refusals = REFUSALS) -> Iterator[str]:
    """Yield the sentence of each refusal in `table` that a config meets; `carriers` are those that it has, by value."""
    for trait, refusals in table.items():
        carrying = ((key, its.name) for key, its in config.train.optimizers.items() if getattr(its, trait))
        if (found := next(carrying, None)) is None:
            continue
        key, name = found
        for carrier, (reason, way_out) in refusals.items():
            if carrier == SCRIPT and SCRIPT in carriers:
                yield f"{key}.name: {name} {reason}: {way_out}"
            elif carrier in carriers:
                value = carriers[carrier]
                place = "" if carrier == ALL else f" with {carrier}: {value}"
                why = reason.format(name=name.capitalize(), value=value)
                yield f"{key}.name: {name} is not available{place}: {why}; {way_out}"
