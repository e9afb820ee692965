"""Tracker for Weights & Biases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.tracking.tracker import Tracker
from unipar.utils.files import write_file_atomically


@final
class WandB(Tracker):
    """Tracker that writes a W&B run to RUN/wandb, offline unless WANDB_MODE is set otherwise.

    The project is WANDB_PROJECT, or unipar.
    """

    requires = ("wandb",)

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports would be sent to W&B's server
        import wandb

        self._wandb: Any = wandb
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "unipar"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", str(run)),
            mode=mode,
            config=dict(config),
            reinit="create_new",  # the user's loop may have a W&B run of its own
            **self._known_id(run),
            settings=self._wandb.Settings(silent=True, console="off"),
        )

        self._note_step(0)

    def _known_id(self, run: Path) -> dict[str, str]:
        """Return arguments with which W&B goes on with the run of an earlier attempt, and read what it has."""
        self._file, self._last, self._written = run / "wandb.json", 0, 0
        if not self._file.exists() or "WANDB_RUN_ID" in os.environ:
            return {}
        known = json.loads(self._file.read_bytes())
        self._last = known["step"]
        return {"id": known["id"], "resume": "allow"}

    def _note_step(self, step: int) -> None:
        self._last = max(self._last, step)
        write_file_atomically(self._file, json.dumps({"id": self._run.id, "step": self._last}))

    @override
    def go_on(self, step: int) -> None:
        """Leave out what an earlier attempt has written: W&B takes no step again."""
        self._written = self._last

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        if step <= self._written:
            return
        self._run.log(dict(named), step=step)
        self._note_step(step)

    @override
    def write_image(self, step: int, name: str, file: Path) -> None:
        if step > self._written:
            self._run.log({name: self._wandb.Image(str(file))}, step=step)
            self._note_step(step)

    @override
    def close(self) -> None:
        self._run.finish()
        if self._wandb.run is None:
            self._wandb.teardown()  # otherwise W&B's service process outlives this one for a while
