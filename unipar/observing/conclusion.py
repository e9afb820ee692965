"""What is concluded of an observed command when it has ended: findings, table and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unipar.observing.command import why_nothing
from unipar.observing.guard import find_findings, what_was_compared
from unipar.observing.settings import ObserveSettings
from unipar.report.build import try_write_page, write_page
from unipar.results.observation import OBSERVED_JSON, Observation, ObservedCommand
from unipar.results.observed_rank import read_observed_ranks
from unipar.utils.files import write_file_atomically


@dataclass(frozen=True)
class Conclusion:
    """What is said of an observed command."""

    observation: Observation | None
    """None: nothing was observed."""

    why_nothing: str = ""
    page: str = ""

    @property
    def faults(self) -> int:
        """Number of faults that were found."""
        found = self.observation.command.findings if self.observation is not None else ()
        return sum(finding.severity == "fault" for finding in found)

    def text(self, width: int) -> str:
        """Return what is printed at the end."""
        if self.observation is None:
            return f"unipar observe: nothing was observed: {self.why_nothing}"
        return f"\n{self.observation.table(width)}\n{self.page}"


def conclude(command: Sequence[str], settings: ObserveSettings, code: int) -> Conclusion:
    """Compare what the ranks have recorded, and write observed.json and the page."""
    ranks = list(read_observed_ranks(settings.folder))
    if not ranks:
        return Conclusion(None, why_nothing(command))
    findings = find_findings(ranks)
    ended = ObservedCommand(
        command=tuple(command),
        exit_code=code,
        findings=tuple(findings),
        checked=tuple(what_was_compared(ranks, findings)),
    )
    write_file_atomically(settings.folder / OBSERVED_JSON, ended.model_dump_json(indent=2))
    page = try_write_page(lambda: write_page(settings.folder))
    return Conclusion(Observation.read(settings.folder), page=page)
