"""The way back from a checkpoint: which one, whether it fits this run, and its state into the engines."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unipar.checkpoint.config_changes import ChangedKey, describe_other_code, find_new_optimizers, refuse_changes
from unipar.checkpoint.packed_values import unpack_values
from unipar.checkpoint.protocol.verifying import CheckpointContents, HashProgress, find_checkpoints, verify_checkpoint
from unipar.checkpoint.saved_state import SavedState, refuse_other_model
from unipar.checkpoint.starting_points import describe_nothing_left
from unipar.checkpoint.tensor_bytes import dtype_name
from unipar.config import Config
from unipar.distributed.meeting.text_rounds import open_rounds
from unipar.distributed.world import World
from unipar.errors import CheckpointError
from unipar.task.location import code_folder, code_hash
from unipar.training.run_loaders import place_loader, refuse_other_data, was_in_loader
from unipar.utils.address import Location, parse_location
from unipar.utils.git import git_revision

if TYPE_CHECKING:
    from unipar.training.training_run import TrainingRun


@dataclass(frozen=True)
class ChosenCheckpoint:
    """Checkpoint from which a run goes on."""

    checkpoint: CheckpointContents
    passed: tuple[str, ...]
    """Sentences about newer checkpoints that are broken, and were passed over."""

    changes: tuple[ChangedKey, ...]
    """Keys of the config that have changed since."""

    given_keys: Collection[str] = ()
    """Keys of the config that were given for this run."""

    own: bool = False
    """Whether an earlier attempt of the run has saved it; if it has done all steps, the run only has to end."""

    @property
    def path(self) -> Location:
        """Folder of the checkpoint."""
        return self.checkpoint.path

    @property
    def state(self) -> Mapping[str, Any]:
        """Contents of its state.json."""
        return self.checkpoint.state

    @property
    def step(self) -> int:
        """Number of steps that it has done."""
        return self.checkpoint.manifest.step


def choose_checkpoint(
    wanted: str,
    folder: Location,
    world: World,
    config: Config,
    given_keys: Collection[str],
    progress: HashProgress | None = None,
    *,
    again: bool = False,
) -> ChosenCheckpoint | None:
    """Return the checkpoint at the path `wanted`, or for "auto" the newest whole one in a folder, or None.

    All ranks call this together: each verifies a part of every candidate, and all choose the same. A broken one is
    passed over under "auto", and an error under a path. `given_keys`: keys of the config that were given for this run.
    `again`: the run has begun from the path in this folder already, whose own checkpoints are newer; the path is taken
    if all of them are broken.
    """
    decide = open_rounds(world, world.key("choose checkpoint"))
    auto = wanted == "auto"
    own, error = list[str](), ""
    if world.rank == 0 and (auto or again):
        try:
            own = [str(checkpoint.path) for checkpoint in find_checkpoints(folder)]
        except CheckpointError as e:
            error = str(e)
    own, error = json.loads(decide(json.dumps([own, error]), lambda texts: texts[0]))
    if error:
        raise CheckpointError(error)
    passed: list[str] = []
    for name in [*own, *([] if auto else [wanted])]:
        path, is_own = parse_location(name), len(passed) < len(own)
        checkpoint, error = None, ""
        try:
            checkpoint = verify_checkpoint(path, share=(world.rank, world.size), progress=progress)
        except CheckpointError as e:
            error = str(e)
        first = decide(error, lambda texts: next(filter(None, texts), ""))
        if not first and checkpoint is not None:
            called = f"checkpoint {path}"
            changes = refuse_changes(checkpoint.state["config"], config.model_dump(mode="json"), given_keys, called)
            return ChosenCheckpoint(checkpoint, tuple(passed), tuple(changes), tuple(given_keys), own=is_own)
        if not is_own:
            others = f"`unipar checkpoint list {shlex.quote(str(path.parent))}` shows the others"
            raise CheckpointError("; ".join([first, *passed, others]))
        passed.append(first)
    if passed:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: " + "; ".join(passed) + "; start anew with `resume: never`"
        )
    return None


def restore_run(
    live: TrainingRun, chosen: ChosenCheckpoint, restored: Callable[[CheckpointContents], None] = lambda _: None
) -> None:
    """Give a run that was just built the state of a checkpoint; all ranks call this together.

    `restored` is called when the engines have their state, before the task has its own.
    """
    state, began = chosen.state, time.monotonic()
    of_loader = was_in_loader(state["data"], live.task)
    if not of_loader:
        refuse_other_data(live.loader, state["data"], chosen.path)
    with SavedState(chosen.path, chosen.checkpoint.manifest) as saved:
        total = _refuse_other_tensors(live, saved)
        classes = {name: part.optimizer for name, part in live.parts.items()}
        config, called = live.config.model_dump(mode="json"), f"checkpoint {chosen.path}"
        begin_anew = find_new_optimizers(state, classes, config, chosen.given_keys, called)
        saved.weights_only = tuple(f"{name}." if len(live.parts) > 1 else "" for name in begin_anew)
        saved.on_read = lambda read: live.heartbeat.set_work("loading the checkpoint", min(read, total), total)
        live.mark("save")
        live.restore(saved)
        restored(chosen.checkpoint)
        for name, part in live.parts.items():
            old = state["parts"][name]
            part.skipped = int(old["skipped"])
            part.engine.restore_counters(old["counters"])
            if name not in begin_anew:
                part.restore_groups(old["groups"])
        if (packed := state["task"]) is not None:  # an import has none, nor has a task that had no state() then
            live.task.load_state(unpack_values(packed, lambda path: saved.whole(path, "task")))
        read = saved.bytes_read
    live.heartbeat.set_work("")
    placed = partial(place_loader, live, saved_in=chosen.checkpoint, given_keys=chosen.given_keys)
    live.go_on_from(chosen.step, placed, of_loader=of_loader)
    if live.early_stop is not None:
        live.early_stop.go_on_from(state.get("early_stop"))
    counted = live.config.train.steps or (not of_loader and live.task.defines("data"))
    if counted and live.done >= live.steps and not (chosen.own and live.done == live.steps):
        raise CheckpointError(describe_nothing_left(chosen.path, live.done, live.steps))
    live.note(
        "resumed",
        step=chosen.step,
        path=str(chosen.path),
        bytes=read,
        seconds=time.monotonic() - began,
        passed=list(chosen.passed),
        told=[*map(str, chosen.changes), *begin_anew.values(), *_other_code(live, state)],
        strategy=state["strategy"],
        size=state["ranks"],
    )


def _other_code(live: TrainingRun, state: Mapping[str, Any]) -> list[str]:
    """Return a sentence if the task's code has changed since, on rank 0."""
    if live.rank != 0:
        return []
    return describe_other_code(state, git_revision(code_folder(live.task)), code_hash(live.task))


def _refuse_other_tensors(live: TrainingRun, saved: SavedState) -> int:
    """Raise the same CheckpointError on all ranks unless the model's tensors are those of the checkpoint.

    Return about how many bytes this rank is to read.
    """
    mine: dict[tuple[str, str], list[Any]] = {}
    total = 0
    for piece in live.pieces():
        if piece.kind in ("weight", "buffer"):
            called = f"{piece.kind} of {piece.name}"
            mine[piece.name, piece.kind] = [list(piece.shape), dtype_name(piece.tensor, called)]
            kinds = saved.kinds(piece.name) if piece.kind == "weight" else {"buffer"}
            total += piece.where.numel * sum(saved.element_bytes(piece.name, kind) for kind in kinds)
    world = live.world
    there = {key: t for key, t in saved.tensors.items() if key[1] in ("weight", "buffer")}

    def judge(texts: list[str]) -> str:
        wanted: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
        for text in dict.fromkeys(texts):
            for name, kind, shape, dtype in json.loads(text):
                wanted[name, kind] = (tuple(shape), dtype)
        refuse_other_model(wanted, there, f"checkpoint {saved.folder}")
        return ""

    rows = [[*key, *value] for key, value in mine.items()]
    open_rounds(world, world.key("tensors"))(json.dumps(rows), judge)
    return total
