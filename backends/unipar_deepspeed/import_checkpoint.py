"""Import of a folder of `save_checkpoint`, of any ZeRO stage and number of ranks; DeepSpeed itself is not needed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from unipar.backend import Region
from unipar.checkpoint.importing.found_state import StateCollector
from unipar.checkpoint.importing.inert_pickle import load_inert
from unipar.checkpoint.importing.state_dicts import collect_optimizer
from unipar.errors import CheckpointError

_WHOLE = "mp_rank_00_model_states.pt"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")


def step_folder(path: Path) -> Path | None:
    """Return the folder of one step: `path` itself, or the one that its file `latest` names; None if it is neither."""
    try:
        tag = (path / "latest").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        tag = "."
    for folder in (path, path / Path(tag).name):
        if any(folder.glob("*mp_rank_*_model_states.pt")):
            return folder
    return None


def recognizes(path: Path) -> bool:
    """Return whether a path is such a folder."""
    return path.is_dir() and step_folder(path) is not None


def collect(path: Path, into: StateCollector, *, weights_only: bool) -> None:
    """Collect weights in full precision, buffers, and moments of the optimizer."""
    folder = step_folder(path)
    assert folder is not None
    others = [f for f in folder.glob("*mp_rank_*_model_states.pt") if "mp_rank_00_" not in f.name]
    if others:
        raise CheckpointError(f"{folder}: its matrices are split over ranks ({others[0].name}), which is not read")
    first = folder / _WHOLE
    if not first.is_file():
        first = folder / f"zero_pp_rank_0_{_WHOLE}"
    model = load_inert(first)
    into.state.step = int(model["global_steps"])
    into.state.skipped = skipped = int(model.get("skipped_steps") or 0)
    if skipped:
        into.state.remarks.append(
            f"{skipped} of its steps were skipped because of the loss scale: the schedule stands {skipped} steps behind"
        )
    ranks = _optimizer_files(folder)
    if not ranks:
        _collect_unsplit(model, into, weights_only=weights_only)
        return
    states = [load_inert(file)["optimizer_state_dict"] for file in ranks]
    _refuse_missing_ranks(folder, states)
    stage3 = "fp32_flat_groups" in states[0]
    shapes: list[Mapping[str, Any]] = list(model["param_shapes"])
    into.learn_prefix([*model["module"], *(name for group in shapes for name in group)])
    trained = {name for group in shapes for name in group}
    for name, t in model["module"].items():
        if name not in trained and (not stage3 or name in model["buffer_names"]):
            into.add_weight(name, t)
    if stage3:
        _collect_frozen(folder, model, len(states), into)
        _collect_stage3(states, shapes, into, weights_only=weights_only)
    else:
        _collect_slices(states, shapes, into, weights_only=weights_only)


def _optimizer_files(folder: Path) -> list[Path]:
    file_of_rank = {int(m[1]): file for file in folder.iterdir() if (m := _RANK.match(file.name))}
    return [file_of_rank[rank] for rank in sorted(file_of_rank)]


def _refuse_missing_ranks(folder: Path, states: Sequence[Mapping[str, Any]]) -> None:
    wanted = states[0]["partition_count"]
    wanted = max(wanted) if isinstance(wanted, list) else wanted
    if wanted != len(states):
        raise CheckpointError(
            f"{folder}: {len(states)} files of {wanted} ranks' optimizer states; copy the missing files there, or "
            "import the weights alone"
        )


def _collect_unsplit(model: Mapping[str, Any], into: StateCollector, *, weights_only: bool) -> None:
    into.learn_prefix(model["module"])
    for name, t in model["module"].items():
        into.add_weight(name, t)
    if model.get("optimizer") and not weights_only:
        if "state" not in model["optimizer"]:
            raise CheckpointError(
                f"{into.source}: its optimizer keeps masters in groups of its own, which are not read; import with "
                "--weights-only"
            )
        collect_optimizer(model["optimizer"], into)


def _moments(state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    """Return the optimizer's state by group; raise CheckpointError if it was saved for another world already."""
    optimizer_state = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
    if not isinstance(optimizer_state, Mapping) or "state" not in optimizer_state:
        raise CheckpointError("an elastic checkpoint, whose optimizer states are not read; import with --weights-only")
    return optimizer_state["state"]


def _flat_values(
    number: int, flat: Tensor, state: Mapping[str, Any], *, weights_only: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the flat tensors of one group on one rank by kind; a number, such as `step`, is one of all parameters."""
    yield "weight", flat
    for kind, value in () if weights_only else _moments(state).get(number, {}).items():
        if isinstance(value, Tensor | int | float):
            yield kind, value


def _collect_slices(
    states: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Any]],
    into: StateCollector,
    *,
    weights_only: bool,
) -> None:
    """Collect stages 1 and 2: each rank has a range of the group, and says where in it each parameter's part is."""
    done: dict[str, int] = {}
    for rank, state in enumerate(states):
        for number, slices in enumerate(state["param_slice_mappings"]):
            flat = state["single_partition_of_fp32_groups"][number]
            values = list(_flat_values(number, flat, state, weights_only=weights_only))
            for name, address in slices.items():
                at, length = int(address.start), int(address.numel)
                where = Region(done.get(name, 0), length)
                done[name] = where.start + length
                _add(name, values, slice(at, at + length), where, rank, into)
    _refuse_gaps(done, shapes, into)


def _collect_stage3(
    states: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Any]],
    into: StateCollector,
    *,
    weights_only: bool,
) -> None:
    """Collect stage 3: each rank has an equal range of every parameter, one after the other, in groups."""
    world, done = len(states), dict[str, int]()
    for rank, state in enumerate(states):
        flats: list[Tensor] = list(state["fp32_flat_groups"])
        number, at = 0, 0
        values = list(_flat_values(0, flats[0], state, weights_only=weights_only))
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            size, numel = -(-math.prod(shape) // world), math.prod(shape)
            while at + size > flats[number].numel() and number + 1 < len(flats):
                number, at = number + 1, 0
                values = list(_flat_values(number, flats[number], state, weights_only=weights_only))
            start = min(rank * size, numel)
            where = Region(start, min(size, numel - start))
            done[name] = done.get(name, 0) + where.length
            _add(name, values, slice(at, at + where.length), where, rank, into)
            at += size
    _refuse_gaps(done, shapes, into)


def _add(
    name: str,
    values: Sequence[tuple[str, Any]],
    there: slice,
    where: Region,
    rank: int,
    into: StateCollector,
) -> None:
    for kind, value in values:
        if kind == "weight":
            into.add_weight(name, value[there], where)
        elif not isinstance(value, Tensor) or value.ndim == 0:
            into.add_moment(name, kind, value)
        else:
            into.add_moment(name, kind, value[there], where)


def _refuse_gaps(done: Mapping[str, int], shapes: Sequence[Mapping[str, Any]], into: StateCollector) -> None:
    for group in shapes:
        for name, shape in group.items():
            if done.get(name, 0) != math.prod(shape):
                raise CheckpointError(
                    f"{into.source}: {name} has {done.get(name, 0):,} of its {math.prod(shape):,} elements"
                )


def _collect_frozen(folder: Path, first: Mapping[str, Any], world: int, into: StateCollector) -> None:
    """Collect parameters that take no gradients under stage 3: every rank's model states hold a range of each."""
    shapes: Mapping[str, Any] = first.get("frozen_param_shapes") or {}
    done = dict.fromkeys(shapes, 0)
    for rank in count() if shapes else ():
        file = folder / f"zero_pp_rank_{rank}_{_WHOLE}"
        if rank == world or not file.is_file():
            break
        fragments = load_inert(file)["frozen_param_fragments"]
        for name, shape in shapes.items():
            numel = math.prod(shape)
            t = fragments[name].reshape(-1)
            start = min(done[name], numel)
            where = Region(start, min(t.numel(), numel - start))
            done[name] = start + where.length
            into.add_weight(name, t[: where.length], where)
    _refuse_gaps(done, [shapes], into)
