"""Table of refusals: what cannot carry a trait of an optimizer, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from unipar.config import Config

SCRIPT: Final = "script"
"""Carrier: a script that `unipar export` writes."""

ALL: Final = "all"
"""Carrier: everything that a backend trains."""


class Refusal(NamedTuple):
    """Trait that something cannot carry. `{name}` and `{value}` are filled in: the optimizer's name, capitalized, and
    the value of the carrier."""

    trait: Literal["whole_matrices", "moments_in_blocks", "moments_in_bf16"]
    """Trait of `OptimizerSettings`."""

    carrier: str
    """Key of the config that does not go with it, or SCRIPT, or ALL."""

    reason: str
    way_out: str
    only: str = ""
    """The value of the key that is refused; empty: every value but that by which the key has no effect."""

    def sentence(self, key: str, name: str, value: object) -> str:
        """Return the refusal of the optimizer under a key."""
        if self.carrier == SCRIPT:
            return f"{key}.name: {name} {self.reason}: {self.way_out}"
        carrier = "" if self.carrier == ALL else f" with {self.carrier}: {value}"
        reason = self.reason.format(name=name.capitalize(), value=value)
        return f"{key}.name: {name} is not available{carrier}: {reason}; {self.way_out}"


_LEAVE_ONE_OUT: Final = "leave one of them out"
_BY_HAND: Final = "export with adamw, and create yours in train.py"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "whole_matrices",
        "parallel.tensor",
        "{name} updates each matrix as a whole, and each of {value} ranks has a part of it",
        "leave parallel.tensor out (parallel.shard: parameters splits between steps alone), or take adamw",
    ),
    Refusal("whole_matrices", "model.offload", "its matrices are joined on the device", _LEAVE_ONE_OUT),
    Refusal(
        "whole_matrices",
        SCRIPT,
        "is unipar's own optimizer, which joins each matrix on one rank, and a script has torch.optim's",
        _BY_HAND,
    ),
    Refusal(
        "moments_in_blocks",
        "parallel.tensor",
        "its moments share a scale in blocks of elements of a row, and each of {value} ranks has a part of most blocks",
        "leave parallel.tensor out (parallel.shard: parameters splits between rows), or take adamw",
    ),
    Refusal(
        "moments_in_blocks",
        "train.precision",
        "torchao computes the update in fp32, with moments of 8 bits",
        "take adamw",
        only="fp64",
    ),
    Refusal(
        "moments_in_blocks",
        "train.sync_every",
        "ranks average their moments, and codes of 8 bits have no mean",
        _LEAVE_ONE_OUT,
    ),
    Refusal(
        "moments_in_blocks",
        "model.offload",
        "moments that are in host memory take none of the device, in 8 bits or 32",
        _LEAVE_ONE_OUT,
    ),
    Refusal(
        "moments_in_blocks",
        SCRIPT,
        "runs torchao's update without compiling it, and keeps moments in blocks that fit every world, which a "
        "script's torchao.optim.AdamW8bit does not",
        _BY_HAND,
    ),
    Refusal(
        "moments_in_bf16",
        "train.sync_every",
        "ranks average their moments, and their mean would be rounded to the nearest bf16",
        _LEAVE_ONE_OUT,
    ),
    Refusal(
        "moments_in_bf16",
        SCRIPT,
        "is unipar's own optimizer, whose roundings are the same on every rank, and a script has torch.optim's",
        _BY_HAND,
    ),
)
"""Refusals of all backends, and of export. A backend has a table of its own beside this one."""


def keys_in_use(config: Config) -> dict[str, object]:
    """Return the values of those keys that some optimizer or backend refuses, without keys that have no effect."""
    tensor, offload = config.parallel.tensor, config.model.offload
    values = {
        "parallel.tensor": None if tensor == 1 else tensor,
        "parallel.shard_over": config.parallel.shard_over,
        "train.precision": config.train.precision,
        "train.sync_every": config.train.sync_every,
        "model.offload": None if offload == "none" else offload,
    }
    return {key: value for key, value in values.items() if value is not None}


def refuse_optimizers(
    config: Config, carriers: Mapping[str, object], table: Sequence[Refusal] = REFUSALS
) -> Iterator[str]:
    """Yield the sentence of each refusal in `table` that a config meets; `carriers` are those that it has, by value."""
    for refusal in table:
        value = carriers.get(refusal.carrier)
        if value is None or (refusal.only and refusal.only != value):
            continue
        for key, its in config.train.optimizers.items():
            if getattr(its, refusal.trait):
                yield refusal.sentence(key, its.name, value)
                break
