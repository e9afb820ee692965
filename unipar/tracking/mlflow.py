"""Tracker for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.tracking.tracker import Tracker
from unipar.utils.mappings import flatten


@final
class MLflow(Tracker):
    """Tracker that writes an MLflow run to MLFLOW_TRACKING_URI, or to RUN/mlflow.db if that is not set.

    The experiment is MLFLOW_EXPERIMENT_NAME, or unipar.
    """

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
        for i in range(0, len(params), 100):  # MLflow takes no more than 100 params in one call
            self._client.log_batch(self._id, params=params[i : i + 100])

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(name, v, now, step) for name, v in named.items()])

    @override
    def close(self) -> None:
        self._client.set_terminated(self._id)
