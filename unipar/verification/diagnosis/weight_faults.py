"""Kinds of faults of weights: another start, ranks whose weights part, weights and moments kept in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from unipar.utils.text import count_of, first_few
from unipar.verification.diagnosis import expert_faults
from unipar.verification.diagnosis.case import Fault, FaultCase
from unipar.verification.judgement.judge import spread_of_copies
from unipar.verification.judgement.tolerance import ROUNDING_UNITS

COARSE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which weights and moments may be kept by mistake."""


def classify_start(case: FaultCase) -> Fault | None:
    """Return the fault of a run that begins with other weights than one process does, on one rank or on all."""
    allowed = ROUNDING_UNITS[case.config.train.precision]
    parted = _parted_weights(case, 0, lambda length: allowed * length)
    if parted:
        _, one, other = next(iter(parted.values()))
        return Fault(
            "other initial weights",
            f"before step 1, {_of_names(list(parted))} on rank {other} and rank {one}: each rank has made its own, and "
            "all must begin with those of one rank",
        )
    wrong = [
        name
        for (name, kind), right in case.base.states[0].items()
        if kind == "weight" and not _is_equal(case.run.states[0].get((name, kind)), right, allowed)
    ]
    if not wrong:
        return None
    if swapped := expert_faults.find_swapped(case, wrong, allowed):
        first, other = next(iter(swapped.items()))
        return Fault(
            "weights in each other's place",
            f"before step 1, {first} has the weights that {other} has in one process, and of {len(swapped)} such "
            "tensors each has those of another one: they were loaded, or sent to their ranks, in another order",
        )
    return classify_kept_dtype(case) or Fault(
        "other initial weights", f"before step 1, {_of_names(wrong)} from those of one process"
    )


def classify_parted_ranks(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of ranks that hold the same weights and update them differently."""
    lengths = {name: float(np.linalg.norm(w)) for (name, kind), w in case.base.states[step].items() if kind == "weight"}
    parted = _parted_weights(case, step, lambda length: 1e-7 * length)
    if not parted:
        return None
    name = max(parted, key=lambda key: parted[key][0] / max(lengths.get(key, 0.0), 1e-300))
    _, one, other = parted[name]
    return Fault(
        "ranks that part",
        f"after step {step}, {_of_names(list(parted))} on rank {other} and rank {one}, most of all {name}: ranks that "
        "hold the same weights must update them by the same gradient",
    )


def classify_kept_dtype(case: FaultCase) -> Fault | None:
    """Return the fault of weights or moments that are kept in fewer bits than those of one process."""
    if case.config.train.precision in ("bf16-master", "fp16"):
        return None
    by_dtype: dict[str, list[str]] = {}
    for what, of_kind in (("weights", _is_weight), ("moments", _is_moment)):
        for dtype in COARSE_DTYPES:
            if all(_fits(case, dtype, of_kind)):
                by_dtype.setdefault(dtype, []).append(what)
    for dtype, kept in by_dtype.items():
        what = " and ".join(kept)
        return Fault(
            f"{what} kept in {dtype}",
            f"after step {case.run.steps}, every number of the {what} is one that {dtype} has, and in one process they "
            f"are not: with train.precision {case.config.train.precision} they must be kept in full",
        )
    return None


def _fits(case: FaultCase, dtype: str, of_kind: Callable[[str], bool]) -> Iterator[bool]:
    """Yield whether each tensor of a kind, if one process does not round it so, has only numbers of this dtype."""
    compared = False
    for (name, kind), tensor in case.run.state.items():
        right = case.own.state.get((name, kind))
        if of_kind(kind) and right is not None and not _is_rounded(right, dtype):
            compared = True
            yield _is_rounded(tensor, dtype)
    yield compared


def _is_weight(kind: str) -> bool:
    return kind == "weight"


def _is_moment(kind: str) -> bool:
    return kind not in ("weight", "step")


def _is_rounded(tensor: torch.Tensor, dtype: str) -> bool:
    return torch.equal(tensor, tensor.to(COARSE_DTYPES[dtype]).to(tensor.dtype))


def _is_equal(mine: np.ndarray | None, right: np.ndarray, allowed: float) -> bool:
    return mine is not None and float(np.linalg.norm(mine - right)) <= allowed * float(np.linalg.norm(right))


def _parted_weights(case: FaultCase, step: int, allowed: Callable[[float], float]) -> dict[str, tuple[float, int, int]]:
    """Return the weights that differ between ranks, with their distance and the ranks."""
    parted: dict[str, tuple[float, int, int]] = {}
    for (name, _), copies in (case.run.held[step] if case.run.held else {}).items():
        off, one, other = spread_of_copies(copies)
        if off > allowed(float(np.linalg.norm(copies[one]))):
            parted.setdefault(name, (off, one, other))
    return parted


def _of_names(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} differs"
    return f"{count_of(len(names), 'weight')} ({first_few(names)}) differ"
