"""Tracker for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from unipar.tracking.tracker import Tracker
from unipar.utils.files import write_file_atomically
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
        self._image: Any = library.Image
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run / 'mlflow.db'}")
        self._client: Any = library.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unipar")
        known = self._client.get_experiment_by_name(name)
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (run / "mlflow").as_uri()
        number = known.experiment_id if known else self._client.create_experiment(name, artifact_location=place)
        self._written: dict[str, int] = {}
        """The last step that an earlier attempt has written, by metric."""

        self._id, known_params = self._begin(run, number)
        params: list[Any] = []
        for key, value in flatten(config):
            if key not in known_params:
                params.append(Param(key, str(value)))
            elif known_params[key] != str(value):  # a param cannot change; a tag can
                self._client.set_tag(self._id, f"now.{key}", str(value))
        for i in range(0, len(params), 100):  # MLflow takes no more than 100 params in one call
            self._client.log_batch(self._id, params=params[i : i + 100])

    def _begin(self, run: Path, experiment: str) -> tuple[str, Mapping[str, str]]:
        """Return the id and the params of MLflow's run: that of an earlier attempt in this folder, or a new one."""
        file = run / "mlflow.id"
        if file.exists():
            known = self._client.get_run(file.read_text("utf-8"))
            self._client.update_run(known.info.run_id, "RUNNING")
            self._known_names = set(known.data.metrics)
            return known.info.run_id, known.data.params
        made = self._client.create_run(experiment, run_name=os.environ.get("MLFLOW_RUN_NAME", run.name)).info.run_id
        write_file_atomically(file, made)
        self._known_names = set[str]()
        return made, {}

    @override
    def go_on(self, step: int) -> None:
        """Leave out what an earlier attempt has written: MLflow can take nothing back."""
        for name in self._known_names:
            self._written[name] = max(m.step for m in self._client.get_metric_history(self._id, name))

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        new = {name: value for name, value in named.items() if step > self._written.get(name, -1)}
        if new:
            self._client.log_batch(self._id, metrics=[self._metric(name, v, now, step) for name, v in new.items()])

    @override
    def write_image(self, step: int, name: str, file: Path) -> None:
        if step > max(self._written.values(), default=-1):
            self._client.log_image(self._id, self._image(str(file)), key=name, step=step, synchronous=True)

    @override
    def close(self) -> None:
        self._client.set_terminated(self._id)
