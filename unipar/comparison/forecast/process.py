"""`make_forecast`: planning of a comparison's cells in a process of its own, which can end nothing but itself."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from unipar.backend import registry
from unipar.comparison.forecast.worker import FORECAST_ENTRY, forecast_path, job_of
from unipar.config import Config
from unipar.config.settled import SettledConfig
from unipar.distributed.gpus import smallest_gpu_memory
from unipar.errors import Stopped, UniparError
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.starters import SharedForkServer
from unipar.results.forecast.records import Forecast, MemorySource
from unipar.run_folder import folder
from unipar.task.reference import TaskRef
from unipar.utils.procfs import memory_limit_bytes
from unipar.utils.text import format_duration

MOST_SECONDS: Final = 120.0
"""Seconds after which planning is ended."""

_SECONDS_BETWEEN_LOOKS = 0.1


def make_forecast(
    compared: SettledConfig,
    cells: Sequence[SettledConfig],
    ref: TaskRef,
    server: SharedForkServer,
    threads: str,
    most_seconds: float = MOST_SECONDS,
) -> Forecast:
    """Return the predictions for these cells; if there are none, a forecast that says why. No error is raised."""
    size, source = device_memory(compared)
    asked = Forecast(
        device="cpu" if compared.device == "cpu" else "cuda",
        ranks=compared.ranks,
        samples=compared.sizes.total,
        share=compared.sizes.micro * compared.sizes.accumulate,
        memory=size,
        memory_from=source,
        headroom=compared.config.batch.headroom,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="unipar-plan-") as place:
            return _in_process(asked, compared, cells, ref, server, threads, Path(place) / "run", most_seconds)
    except (KeyboardInterrupt, Stopped):
        why = "planning was interrupted"
    except (UniparError, ValidationError, OSError) as e:
        why = f"planning failed: {str(e).partition(chr(10))[0]}"
    return asked.model_copy(update={"problem": why})


def _in_process(
    asked: Forecast,
    compared: SettledConfig,
    cells: Sequence[SettledConfig],
    ref: TaskRef,
    server: SharedForkServer,
    threads: str,
    run: Path,
    most_seconds: float,
) -> Forecast:
    launch = {"task": ref.to_json(), "settled": compared.to_json(), "forecast": job_of(asked, compared, cells)}
    texts = compared.config.json_for_ranks(), json.dumps(launch)
    began = time.monotonic()
    with (
        folder.create_run_folder(run, *texts, overwrite=False),
        WorkerGroup(
            run,
            1,
            FORECAST_ENTRY,
            environment={"OMP_NUM_THREADS": threads},
            pickled_task=ref.pickled_task,
            starter=server.starter_of(registry.find_backend(cells[0].cell.backend)),
        ) as workers,
    ):
        while not workers.poll(_SECONDS_BETWEEN_LOOKS):
            if time.monotonic() - began > most_seconds:
                why = f"planning took more than {format_duration(most_seconds)} and was ended; try `unipar plan`"
                return asked.model_copy(update={"problem": why})
    return Forecast.model_validate_json(forecast_path(run).read_bytes())


def device_memory(compared: SettledConfig) -> tuple[int | None, MemorySource]:
    """Return the memory of a rank's device and where the number is from: batch.memory, the GPU, or this machine."""
    config: Config = compared.config
    if config.batch.memory is not None:
        return config.batch.memory, "batch.memory"
    try:
        if compared.device == "cpu":
            return memory_limit_bytes(), "machine"
        shared_by = compared.ranks if ":" in compared.device else 1
        return smallest_gpu_memory() // shared_by, "GPU"
    except (OSError, ValueError, LookupError):
        return None, ""
