"""Conclusion about an observed command when it has ended: findings, table and page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from unipar.observing.command import why_nothing
from unipar.observing.draft_task import try_write_draft
from unipar.observing.guard import find_findings, what_was_compared
from unipar.observing.settings import ObserveSettings
from unipar.report.build import try_write_page, write_page
from unipar.results.observation import OBSERVED_JSON, Observation, ObservedCommand
from unipar.results.observed_rank import read_observed_ranks
from unipar.utils.files import write_file_atomically


@dataclass(frozen=True)
class Conclusion:
    """Results of an observed command, or why there are none."""

    observation: Observation | None
    """None: nothing was observed."""

    why_nothing: str = ""
    page: str = ""
    draft: str = ""
    """What is said of the draft of a task, if one was asked for."""

    @property
    def faults(self) -> int:
        """Number of faults that were found."""
        found = self.observation.command.findings if self.observation is not None else ()
        return sum(finding.severity == "fault" for finding in found)

    def text(self, width: int) -> str:
        """Return what is printed at the end."""
        if self.observation is None:
            return textwrap.fill(
                f"unipar observe: nothing was observed: {self.why_nothing}",
                width,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
        after = f"\n{self.draft}" if self.draft else ""
        return f"\n{self.observation.table(width)}\n{self.page}{after}"


def conclude(command: Sequence[str], settings: ObserveSettings, code: int, *, draft: bool = False) -> Conclusion:
    """Compare what the ranks have recorded, and write observed.json, the page and, if asked for, a draft of a task."""
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
    written = try_write_draft(settings.folder) if draft else ""
    return Conclusion(Observation.read(settings.folder), page=page, draft=written)
