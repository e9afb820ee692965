"""`Observation`: results of an observed command, read from its folder."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from typing_extensions import override

from unipar.backend.observed_library import TrainingFault
from unipar.config import Section
from unipar.errors import ReportError
from unipar.memory.account import MemoryAccount, read_accounts
from unipar.results.memory_tables import largest_account
from unipar.results.observation_table import (
    describe_script,
    describe_sent,
    describe_times,
    describe_training,
    describe_work,
    format_phases_table,
    format_ranks_table,
    shown_ranks,
)
from unipar.results.observed_rank import ObservedRank, read_observed_ranks
from unipar.results.run_report import Report
from unipar.run_folder.layout import PAGE_FILE_NAME, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.notebook import ShownAsPage
from unipar.utils.table import wrap_lines
from unipar.utils.text import count_of, cut_words

OBSERVED_JSON: Final = "observed.json"
"""Name of the file with the command and the findings."""

_MOST_LINES: Final = 24
"""Lines of the text if it is a screen; the least important parts are left out until it is."""

_LONGEST_NAME: Final = 44
"""Characters to which names of weights are cut in sentences."""

_SHORTER: Final = 5
"""Number of times that the text is made shorter, if it is longer than a screen."""


class TrainingFinding(Section):
    """Something about an observed training that gives no error and is perhaps not meant."""

    kind: TrainingFault
    severity: Literal["fault", "note"]
    """fault: the training is not what it seems; note: many scripts do it on purpose."""

    ranks: tuple[int, ...] = ()
    """Ranks that show it; empty: all."""

    step: int | None = None
    parameter: str = ""
    says: str
    """Sentence on what was seen."""

    way_out: str = ""

    @override
    def __str__(self) -> str:
        step = f"step {self.step}: " if self.step else ""
        way = f" Way out: {self.way_out}." if self.way_out else ""
        return f"{step}{self.says}.{way}"


class ObservedCommand(Section):
    """The command, how it ended, and the findings: contents of observed.json."""

    command: tuple[str, ...]
    exit_code: int
    """Exit code, below 0 for a signal."""

    findings: tuple[TrainingFinding, ...] = ()
    checked: tuple[str, ...] = ()
    """Comparisons between the ranks that found nothing."""

    notes: tuple[str, ...] = ()

    def describe_end(self) -> str:
        """Return how the command ended."""
        if not self.exit_code:
            return "ended with exit code 0"
        if self.exit_code > 0:
            return f"failed with exit code {self.exit_code}"
        names = {each.value: each.name for each in signal.Signals}
        return f"was ended by {names.get(-self.exit_code, f'signal {-self.exit_code}')}"

    def count_findings(self) -> str:
        """Return how many faults and notes there are: "2 faults, 1 note", or "no fault"."""
        faults = sum(finding.severity == "fault" for finding in self.findings)
        notes = len(self.findings) - faults
        words = [count_of(faults, "fault") if faults else "no fault", *([count_of(notes, "note")] if notes else [])]
        return ", ".join(words)


@dataclass(frozen=True)
class Observation(ShownAsPage):
    """Results of an observed command. It prints as a screen of text."""

    folder: Path
    command: ObservedCommand
    ranks: tuple[ObservedRank, ...]
    report: Report
    accounts: tuple[MemoryAccount, ...]
    """Memory accounts of the ranks that wrote one."""

    problems: tuple[str, ...] = ()
    """Sentences on files that could not be read."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the results in a folder; raise ReportError if there are none."""
        file = folder / OBSERVED_JSON
        try:
            command = ObservedCommand.model_validate_json(file.read_bytes())
        except (OSError, ValueError) as e:
            raise ReportError(f"{file} cannot be read as the result of `unipar observe`: {e}") from None
        ranks = tuple(read_observed_ranks(folder))
        if not ranks:
            raise ReportError(
                f"{folder} holds {OBSERVED_JSON} and no rank-0.observed.json of a rank: run the command again "
                "under `unipar observe`"
            )
        problems: list[str] = []
        accounts = tuple(account for account in read_accounts(folder, problems) if account.phases)
        return cls(folder, command, ranks, _read_report(folder, ranks), accounts, tuple(problems))

    @property
    @override
    def page(self) -> Path:
        return self.folder / PAGE_FILE_NAME

    @property
    def notes(self) -> list[str]:
        """Sentences on what could not be observed, each once."""
        return list(dict.fromkeys([*self.command.notes, *(note for rank in self.ranks for note in rank.notes)]))

    @property
    def fullest_account(self) -> MemoryAccount | None:
        """Account of the rank with the highest peak; None if memory was not recorded."""
        return largest_account(self.accounts) if self.accounts else None

    @override
    def __str__(self) -> str:
        return self.table()

    @override
    def table(self, width: int = 80) -> str:
        """Return the observation in a screen of text; what has no place there is on the page."""
        lines: list[str] = []
        for shorter in range(_SHORTER + 1):
            blocks = [block for block in self._blocks(width, shorter) if block]
            lines = [line for block in blocks for line in ("", *block)][1:]
            if len(lines) <= _MOST_LINES:
                break
        return "\n".join(lines)

    def _blocks(self, width: int, shorter: int) -> list[list[str]]:
        """Return the blocks of the text; `shorter`: how many of its parts give way."""
        account = self.fullest_account
        only_peak = shorter >= 3
        memory = [] if account is None else format_phases_table(account, width, only_peak=only_peak)
        sentences = describe_training(self.ranks[0], self.report)
        sentences += describe_work(self.ranks)
        explained = describe_times(self.ranks)
        if account is not None:
            sentences += describe_sent(account)
            explained = "; ".join(filter(None, [explained, _describe_memory(account)]))
        if explained and not shorter:
            sentences.append(explained)
        end = f"; it {self.command.describe_end()}" if self.command.exit_code else ""
        return [
            wrap_lines([f"unipar observe: {describe_script(self.ranks)}{end}"], width, at_hyphens=False),
            self._finding_lines(width, 3 if shorter >= 4 else None, ways=shorter < _SHORTER),
            [
                *format_ranks_table(shown_ranks(self.ranks, 2 if shorter >= 2 else 4), width),
                *wrap_lines(self._rank_sentences(2 if shorter >= 2 else 4), width, at_hyphens=False),
            ],
            memory,
            wrap_lines([*sentences, *self._note_sentences(shorter)], width, at_hyphens=False),
        ]

    def _finding_lines(self, width: int, most: int | None, *, ways: bool) -> list[str]:
        shown = self.command.findings[:most]
        lines = wrap_lines([describe_finding(finding, way=ways) for finding in shown], width, at_hyphens=False)
        left = len(self.command.findings) - len(shown)
        missing = [count_of(left, "more finding")] if left else []
        missing += [] if ways or not any(finding.way_out for finding in shown) else ["the ways out"]
        lines += wrap_lines([f"{' and '.join(missing)}: see the page"] if missing else [], width, at_hyphens=False)
        compared = ", ".join(self.command.checked)
        if not ways:
            return lines
        if not self.command.findings:
            return wrap_lines(
                [f"no fault was found; compared: {compared or 'nothing, no step was seen whole'}"],
                width,
                at_hyphens=False,
            )
        return lines + wrap_lines(
            [f"compared without a finding: {compared}"] if compared else [], width, at_hyphens=False
        )

    def _rank_sentences(self, most: int) -> list[str]:
        left = len(self.ranks) - len(shown_ranks(self.ranks, most))
        return [f"{count_of(left, 'further rank')}: see the page"] if left else []

    def _note_sentences(self, shorter: int) -> list[str]:
        most = 0 if shorter >= _SHORTER else 1 if shorter >= 2 else 3
        left = len(self.notes) - most
        return [
            *(f"note: {cut_words(note, _LONGEST_NAME)}" for note in self.notes[:most]),
            *([f"{count_of(left, 'more note' if most else 'note')}: see the page"] if left > 0 else []),
        ]


def _read_report(folder: Path, ranks: Sequence[ObservedRank]) -> Report:
    """Return the report of the run logs; raise ReportError if one is damaged."""
    logs = [run_log_path(folder, rank.rank) for rank in ranks]
    try:
        return Report.of(folder, [list(RunLog.read(log)) for log in logs])
    except (OSError, LookupError, TypeError, ValueError) as e:
        raise ReportError(
            f"the run logs in {folder} cannot be read ({type(e).__name__}: {e}): observe the command again"
        ) from None


def describe_finding(finding: TrainingFinding, *, way: bool = True, state: str = "") -> str:
    """Return a finding in one line; `way`: with its way out; `state`: new, gone, or in both of two observations."""
    step = f", step {finding.step}" if finding.step else ""
    says = cut_words(finding.says, _LONGEST_NAME)
    out = f" Way out: {finding.way_out}." if way and finding.way_out else ""
    return f"{state} {finding.severity}, {finding.kind}{step}: {says}.{out}".lstrip()


def _describe_memory(account: MemoryAccount) -> str:
    share = f", {account.peak.unattributed:.1%} of the peak" if account.peak.held.get("unattributed") else ""
    return f"rest: buffers, libraries, Python; ?: unattributed{share}"
