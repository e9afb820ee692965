"""Tracker for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.tracking.tracker import Tracker


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
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        self._run.log(dict(named), step=step)

    @override
    def close(self) -> None:
        self._run.finish()
        if self._wandb.run is None:
            self._wandb.teardown()  # otherwise W&B's service process outlives this one for a while
