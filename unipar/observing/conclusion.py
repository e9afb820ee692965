"""Conclusion about an observed command when it has ended: findings, table and page."""

from __future__ import annotations

import socket
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unipar.errors import ConfigError
from unipar.observing.command import why_nothing
from unipar.observing.draft_task import try_write_draft
from unipar.observing.guard import find_findings, what_was_compared
from unipar.report.build import try_write_page, write_page
from unipar.results.observation import OBSERVED_JSON, Observation, ObservedCommand
from unipar.results.observed_rank import ObservedRank, read_observed_ranks
from unipar.utils.files import write_file_atomically
from unipar.utils.text import first_few

_PATIENCE: Final = 10.0
"""Seconds that ranks on other machines may end later."""


@dataclass(frozen=True)
class Conclusion:
    """Results of an observed command, or why there are none."""

    observation: Observation | None
    """None: nothing was observed."""

    why_nothing: str = ""
    page: str = ""
    draft: str = ""
    """Sentences on the draft of a task, if one was asked for."""

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


def conclude(command: Sequence[str], folder: Path, code: int, *, draft: bool = False) -> Conclusion:
    """Compare what the ranks have recorded, and write observed.json, the page and, if asked for, a draft of a task."""
    ranks = _wait_for_ranks(folder)
    if not ranks:
        return Conclusion(None, why_nothing(command))
    findings = find_findings(ranks)
    ended = ObservedCommand(
        command=tuple(command),
        exit_code=code,
        findings=tuple(findings),
        checked=tuple(what_was_compared(ranks, findings)),
        notes=tuple(_missing_ranks(ranks)),
    )
    write_file_atomically(folder / OBSERVED_JSON, ended.model_dump_json(indent=2))
    page = try_write_page(lambda: write_page(folder))
    written = try_write_draft(folder) if draft else ""
    return Conclusion(Observation.read(folder), page=page, draft=written)


def conclude_again(folder: Path) -> Conclusion:
    """Compare the ranks whose records lie in a folder now, such as those of several machines, copied there."""
    if not (folder / OBSERVED_JSON).exists():
        raise ConfigError(f"{folder} holds no {OBSERVED_JSON}: give the folder of a command that was observed")
    before = Observation.read(folder).command
    return conclude(before.command, folder, before.exit_code)


def _wait_for_ranks(folder: Path) -> list[ObservedRank]:
    """Return what all ranks have recorded; those on other machines may end a little later."""
    until, here = time.monotonic() + _PATIENCE, socket.gethostname()
    while True:
        ranks = list(read_observed_ranks(folder))
        if time.monotonic() > until or all(rank.begun is not None or rank.host == here for rank in ranks):
            return ranks
        time.sleep(0.1)


def _missing_ranks(ranks: Sequence[ObservedRank]) -> Iterator[str]:
    size = max(rank.size for rank in ranks)
    missing = [str(number) for number in range(size) if number not in {rank.rank for rank in ranks}]
    if missing and size > 1:
        yield (
            f"{len(missing)} of {size} ranks wrote nothing into this folder "
            f"(rank{'s' if len(missing) > 1 else ''} {first_few(missing)}): if they ran on a machine that does not "
            "share it, give --out a folder that all share, or copy their rank-* files here and compare all by "
            "`unipar observe --from DIR`"
        )
