"""Saves of a run in training: when one is due, what it holds besides tensors, what is kept."""

from __future__ import annotations

import hashlib
import json
import math
import socket
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from unipar.backend import Piece, Region
from unipar.checkpoint.packed_values import pack_values
from unipar.checkpoint.protocol.joint_attempts import attempt_together
from unipar.checkpoint.protocol.probing import check_checkpoint_folder
from unipar.checkpoint.protocol.retention import Retention
from unipar.checkpoint.protocol.verifying import CheckpointContents, find_checkpoints
from unipar.checkpoint.saving import CheckpointSaver, FinishedSave, GatheredState
from unipar.config.sections.checkpoint import Best, Checkpoint
from unipar.distributed.meeting.text_rounds import open_rounds
from unipar.errors import CheckpointError, TaskError
from unipar.model.state_names import saves_frozen_once
from unipar.run_folder.layout import checkpoint_folder
from unipar.task.location import code_folder, code_hash
from unipar.training.run_loaders import describe_data_position
from unipar.training.stopping import StepAgreement
from unipar.training.trained_parts import trained_piece_names
from unipar.utils.address import Location
from unipar.utils.git import git_revision

if TYPE_CHECKING:
    from unipar.training.training_run import TrainingRun


@final
class RunCheckpoints:
    """Saves of a run in training, at step boundaries; all ranks call its methods together."""

    def __init__(
        self,
        settings: Checkpoint,
        live: TrainingRun,
        run: Path,
        launched: Mapping[str, Any],
        *,
        into: Location | None = None,
    ) -> None:
        """`launched`: contents of the run's launch.json, for the versions and the strategy that the state names.

        `into`: folder of the checkpoints, if it is not the one that the settings name.
        """
        self._settings, self._live, self._launched = settings, live, launched
        self._best: list[tuple[int, float]] = []
        """Step and value of the best evaluations so far, the best first."""

        self._git = git_revision(code_folder(live.task)) if live.rank == 0 else None
        self._code = code_hash(live.task) if live.rank == 0 else None
        self._is_best = False
        self._metrics: dict[str, float] = {}
        self._evaluated: int | None = None
        """Steps that were done at the last evaluation."""

        self._last_saved: int | None = None
        self._missing: set[int] = set()
        """Steps whose save has failed; each rank learns of it at a step of its own."""

        self._has_warned = False
        """Whether a line has said that the stream has no state."""

        self._began = time.monotonic()
        self._agreement = StepAgreement(live.world, "save", live.config.train.local_steps or 1)
        configs = [one for part in live.parts.values() for one in part.state_names.configs]
        self._saver = CheckpointSaver(
            into or checkpoint_folder(run, settings.to),
            live.world,
            asynchronous=settings.asynchronous,
            trained=trained_piece_names(live.parts) if saves_frozen_once(live.config, configs) else None,
            mark=live.mark,
            progress=partial(live.heartbeat.set_work, "saving"),
        )

    @property
    def folder(self) -> Location:
        """Folder in which the checkpoints are."""
        return self._saver.folder

    def check_folder(self) -> None:
        """Check that checkpoints can be saved, before the first step; a failure is one of a save."""
        world = self._live.world
        decide = open_rounds(world, world.key("checkpoint folder"))
        frozen = self._saver.frozen
        needed = sum(
            p.where.numel * p.tensor.element_size()
            for p in self._live.pieces()
            if not (frozen.folder and frozen.has(p))  # those are there
        )
        try:
            check_checkpoint_folder(self.folder, needed, rank=world.rank, decide=decide, machine=socket.gethostname())
        except CheckpointError as e:
            self._fail(e)

    def after_restore(self, chosen: CheckpointContents) -> None:
        """Go on with the frozen weights beside the checkpoint that was just read, if it is one of this folder."""
        if chosen.path.parent == self.folder:
            self._saver.frozen.go_on_from(chosen.manifest, self._live.pieces())

    def go_on_from(self, step: int, state: Mapping[str, Any]) -> None:
        """Count the checkpoint from which the run goes on as the last one, and those of its best that are here."""
        best = [(int(at), float(value)) for at, value in state["best"]]
        world = self._live.world
        decide = open_rounds(world, world.key("best checkpoints"))

        def steps_here() -> list[int]:
            return [checkpoint.step for checkpoint in find_checkpoints(self.folder)] if best and world.rank == 0 else []

        here: list[int] = []
        try:
            here = attempt_together(decide, steps_here, lambda failure, answer: f"{self.folder}: {failure}")[0]
        except CheckpointError as e:
            self._fail(e)
        self._last_saved, self._best = step, [pair for pair in best if pair[0] in here]
        metrics = {name: value for name, value in state["metrics"].items() if value is not None}
        self._metrics, self._evaluated = metrics, state.get("evaluated")

    def at_boundary(self, done: int) -> None:
        """Save if a save is due after `done` steps; raise what made an earlier one fail."""
        self._take(self._saver.finished)
        if self._is_due(done, timed=self._is_time(done)):
            self.save(done)

    def _is_time(self, done: int) -> bool:
        """Return whether the ranks have agreed that rank 0's clock wants a save here."""
        seconds = self._settings.seconds
        if seconds is None:
            return False
        over = self._live.rank == 0 and time.monotonic() - self._began >= seconds
        return self._agreement(done, "its time" if over else "")

    def _is_due(self, done: int, *, timed: bool) -> bool:
        if done == 0 or done == self._last_saved or not self._live.is_synchronized:
            return False
        every = self._settings.every
        return timed or self._is_best or (isinstance(every, int) and done % every == 0)

    def save(self, done: int) -> None:
        """Save the state after `done` steps, once an earlier save has ended."""
        self._take(self._saver.wait)
        self._best = [pair for pair in self._best if pair[0] not in self._missing]  # all ranks know of them here
        live = self._live
        live.check_state()  # a state behind a loss that is not finite, or that is not itself, is never published
        self._is_best, self._began, self._last_saved = False, time.monotonic(), done
        kept = Retention(self._settings.keep, [step for step, _ in self._best])
        data, of_streams = describe_data_position(live, done)
        if (why := data.get("stream", {}).get("why")) and not self._has_warned:
            live.note("data", said=f"{why}: a run that goes on from a checkpoint reads it on")
            self._has_warned = True

        def gather() -> GatheredState:
            self._refuse_unsaved_values()
            task, tensors = pack_values(live.task.state(), "state", "state()")
            return self._pieces(tensors, of_streams), self._state(data, task)

        try:
            self._saver.save(done, gather, kept)
        except CheckpointError as e:
            self._fail(e, done)
        if not self._settings.asynchronous:
            self._take(self._saver.finished)
        live.mark("between")

    def publish_pending(self) -> None:
        """Wait until a save that has begun is published."""
        self._take(self._saver.wait)

    def at_end(self, done: int) -> None:
        """Save the last state, and wait until it is published."""
        if self._settings.best is not None and self._evaluated is None and not self._live.config.eval.every:
            self._live.note("read on", said="nothing was evaluated, so checkpoint.best had no effect: set eval.every")
        if done and self._last_saved != done and self._live.is_synchronized:
            self.save(done)
        self._take(self._saver.wait)
        self._saver.close()
        self._live.world.barrier()  # until all ranks have read the store, which may be in a rank that exits first

    def after_evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Keep what an evaluation gave, and whether it is one of the best."""
        self._metrics, self._evaluated = dict(metrics), done
        wanted = self._settings.best
        if wanted is None or any(step == done for step, _ in self._best):
            return
        if wanted.metric not in metrics:
            if done and done != self._last_saved and self._live.is_synchronized and len(self._live.parts) == 1:
                self.save(done)  # what was trained is not lost with the error
            self._take(self._saver.wait)
            raise TaskError(
                f"checkpoint.best.metric: the evaluation has no {wanted.metric!r}; it has "
                + (", ".join(metrics) or "none")
            )
        value = metrics[wanted.metric]
        if not math.isfinite(value):
            return
        ranked = rank_best([*self._best, (done, value)], wanted)
        self._is_best = any(step == done for step, _ in ranked)
        self._best = ranked

    def _take(self, result: Any) -> None:
        """Note the save that has ended, if any; treat its error as `checkpoint.on_error` says."""
        try:
            finished: FinishedSave | None = result()
        except CheckpointError as e:
            self._live.heartbeat.set_work("")
            self._fail(e, self._last_saved)
            return
        if finished is not None:
            self._live.heartbeat.set_work("")
            saved = finished.saved
            self._live.note(
                "checkpoint",
                step=saved.step,
                path=str(saved.path),
                bytes=saved.bytes,
                waited=finished.waited,
                seconds=finished.seconds,
                removed=list(saved.removed),
                remarks=list(saved.remarks),
            )

    def _fail(self, error: CheckpointError, step: int | None = None) -> None:
        """Treat an error as `checkpoint.on_error` says; `step`: that of the save that failed, if it was one."""
        if self._settings.on_error == "stop":
            raise error
        if step is not None:
            self._missing.add(step)
        self._live.note("checkpoint failed", step=self._live.done, said=str(error))

    def _refuse_unsaved_values(self) -> None:
        """Raise CheckpointError if an optimizer keeps what no piece of state can hold."""
        for part in self._live.parts.values():
            for sentence in part.engine.unsaved_values():
                raise CheckpointError(sentence)

    def _pieces(self, of_task: Mapping[str, Tensor], of_streams: Mapping[str, Tensor]) -> Iterator[Piece]:
        """Yield this rank's pieces of the engines' state, of the task's own if it is rank 0, and of its streams."""
        yield from self._live.pieces()
        for kind, tensors in (("task", of_task if self._live.rank == 0 else {}), ("stream", of_streams)):
            for name, t in tensors.items():
                yield Piece(name, kind, tuple(t.shape), Region(0, t.numel()), t.contiguous())

    def _state(self, data: Mapping[str, Any], task: Any) -> dict[str, Any]:
        """Return what state.json holds besides step and format; `data`: the place in the data."""
        live = self._live
        config = live.config.model_dump(mode="json")
        text = json.dumps(config, sort_keys=True, separators=(",", ":"))
        return {
            "unipar": self._launched.get("versions", {}),
            "git": self._git,
            "code_sha256": self._code,
            "time": time.time(),
            "strategy": str(self._launched.get("settled", {}).get("strategy", "")),
            "ranks": live.size,
            "config": config,
            "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "data": data,
            "steps": live.steps,
            "parts": {
                name: {
                    "skipped": part.count_skipped(),
                    "counters": part.engine.counters(),
                    "optimizer": part.optimizer,
                    "groups": part.group_state(),
                    "tied": part.tied,
                    **part.state_names._asdict(),
                }
                for name, part in live.parts.items()
            },
            "metrics": {name: value if math.isfinite(value) else None for name, value in self._metrics.items()},
            "evaluated": self._evaluated,
            "best": [list(pair) for pair in self._best],
            "early_stop": None if live.early_stop is None else live.early_stop.state(),
            "task": task,
        }


def rank_best(values: list[tuple[int, float]], wanted: Best) -> list[tuple[int, float]]:
    """Return the best of (step, value), best first; of equal values the earlier step."""
    sign = 1 if wanted.mode == "min" else -1
    return sorted(values, key=lambda pair: (sign * pair[1], pair[0]))[: wanted.keep]
