"""Data of the page of an observed command, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from unipar.report.data.run_data import RunPageData
from unipar.results.observation import Observation
from unipar.run_folder.layout import run_log_path


@dataclass(frozen=True)
class ObservationPageData:
    """Data of an observed command, as its page shows it."""

    observation: Observation
    run: RunPageData
    """Data of its ranks' run logs, as a run's page shows them."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.observation.folder.resolve().name

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return what the folder of observed.json holds; raise ReportError if it cannot be read."""
        observation = Observation.read(file.parent)
        return cls(observation, RunPageData.read(run_log_path(file.parent, observation.ranks[0].rank)))
