"""Our own trackers: TensorBoard, Weights & Biases and MLflow, all three without a network unless they are told."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.mappings import flatten
from unipar.track import Tracker


@final
class TensorBoard(Tracker):
    """Event files in RUN/tensorboard."""

    requires = ("tensorboard",)

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), flush_secs=10)  # a run may end in an error
        rows = "\n".join(f"    {key}: {value}" for key, value in flatten(config))  # four spaces: code, to its Markdown
        self._writer.add_text("config", rows)

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        for name, value in named.items():
            self._writer.add_scalar(name, value, step)

    @override
    def close(self) -> None:
        self._writer.close()


@final
class WandB(Tracker):
    """A run in RUN/wandb, offline unless WANDB_MODE says otherwise; its project is WANDB_PROJECT, or unipar."""

    requires = ("wandb",)

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would go to their server
        import wandb

        self._wandb: Any = wandb
        self._run: Any = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "unipar"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", str(run)),
            mode=mode,
            config=dict(config),
            reinit="create_new",  # the task's own loop may have a run besides
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        self._run.log(dict(named), step=step)

    @override
    def close(self) -> None:
        self._run.finish()
        if self._wandb.run is None:
            self._wandb.teardown()  # its process would outlive this one for a while


@final
class MLflow(Tracker):
    """A run in RUN/mlflow.db, or in MLFLOW_TRACKING_URI; its experiment is MLFLOW_EXPERIMENT_NAME, or unipar."""

    requires = ("mlflow", "sqlalchemy", "alembic")

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow.entities import Metric, Param

        library: Any = mlflow
        self._metric: Any = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run / 'mlflow.db'}")
        self._client: Any = library.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unipar")
        known = self._client.get_experiment_by_name(name)
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (run / "mlflow").as_uri()
        number = known.experiment_id if known else self._client.create_experiment(name, artifact_location=place)
        self._id = self._client.create_run(number, run_name=os.environ.get("MLFLOW_RUN_NAME", run.name)).info.run_id
        params: list[Any] = [Param(key, str(value)) for key, value in flatten(config)]
        for i in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(self._id, params=params[i : i + 100])

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(name, v, now, step) for name, v in named.items()])

    @override
    def close(self) -> None:
        self._client.set_terminated(self._id)
