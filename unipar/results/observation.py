"""`Observation`: results of an observed command, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from typing_extensions import override

from unipar.backend.observed_library import Fault
from unipar.config import Section
from unipar.errors import ReportError
from unipar.memory.account import MemoryAccount, PhasePeak, read_accounts
from unipar.results.memory_tables import category_column, category_groups, format_mib, largest_account
from unipar.results.observed_rank import ObservedRank, read_observed_ranks
from unipar.results.run_report import Report
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.utils.columns import Column, known_columns, table_blocks
from unipar.utils.notebook import ShownAsPage
from unipar.utils.table import format_table
from unipar.utils.text import count_of, format_duration, format_size

OBSERVED_JSON: Final = "observed.json"
"""Name of the file with the command and the findings."""


class Finding(Section):
    """Something about an observed training that gives no error and is perhaps not meant."""

    kind: Fault
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

    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    """What was compared between the ranks without a finding."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation(ShownAsPage):
    """Results of an observed command. It prints as a few lines of text."""

    folder: Path
    command: ObservedCommand
    ranks: tuple[ObservedRank, ...]
    report: Report
    accounts: tuple[MemoryAccount, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the results in a folder; raise ReportError if there are none."""
        file = folder / OBSERVED_JSON
        try:
            command = ObservedCommand.model_validate_json(file.read_bytes())
        except (OSError, ValueError) as e:
            raise ReportError(f"{file} cannot be read as the result of `unipar observe`: {e}") from None
        problems: list[str] = []
        accounts = tuple(read_accounts(folder, problems))
        ranks = tuple(read_observed_ranks(folder))
        return cls(folder, command, ranks, Report.read(folder), accounts)

    @property
    @override
    def page(self) -> Path:
        return self.folder / PAGE_FILE_NAME

    @override
    def __str__(self) -> str:
        return self.table()

    @override
    def table(self, width: int = 80) -> str:
        """Return the observation in a screen of text."""
        lines = [describe_script(self.ranks), "", *format_ranks_table(self.ranks, width)]
        if self.accounts:
            account = largest_account(self.accounts)
            lines += ["", *format_phases_table(account, width), *_sent_lines(account, width)]
        lines += ["", *self._guard_lines()]
        notes = dict.fromkeys([*self.command.notes, *(note for rank in self.ranks for note in rank.notes)])
        lines += [f"note: {note}" for note in notes]
        return "\n".join(lines)

    def _guard_lines(self) -> list[str]:
        findings = [f"{finding.severity}: {finding}" for finding in self.command.findings]
        compared = ", ".join(self.command.checked)
        return [*findings, *([f"compared without a finding: {compared}"] if compared else [])]


def describe_script(ranks: Sequence[ObservedRank]) -> str:
    """Return what the script trains, with what, and on how many ranks."""
    first = ranks[0]
    by = " in ".join(reversed(first.libraries)) if first.libraries else "the script's own loop"
    models = "; ".join(first.models) or "no model that is still alive"
    optimizers = ", ".join(dict.fromkeys(first.optimizers))
    micros = max(first.backwards, default=0)
    gathered = f", {micros} backwards each" if micros > 1 else ""
    skipped = f", {first.skipped} skipped by loss scaling" if first.skipped else ""
    return (
        f"{count_of(first.size, 'rank')}; {models}; {first.parameters:,} parameters; {optimizers}; called by {by}; "
        f"{count_of(first.steps, 'step')}{gathered}{skipped}"
    )


def _phase_column(phase: str, head: str) -> Column[ObservedRank]:
    return Column(head, lambda rank: rank.phases.get(phase), format_duration, optional=True)


RANK_COLUMNS: Final[Sequence[Column[ObservedRank]]] = (
    Column("rank", lambda rank: rank.rank),
    Column("a step", lambda rank: rank.seconds, format_duration),
    _phase_column("data", "data"),
    _phase_column("forward", "forward"),
    _phase_column("backward", "backward"),
    _phase_column("update", "update"),
    _phase_column("between", "between"),
    Column("waits", lambda rank: rank.waiting, "{:.0%}".format, optional=True),
    Column("norm", lambda rank: next(reversed(rank.norms.values()), None), "{:.4g}".format, optional=True),
    Column("rate", lambda rank: next((r[0] for r in reversed(rank.rates.values()) if r), None), "{:.3g}".format),
    Column("loss", lambda rank: rank.losses[-1] if rank.losses else None, "{:.4f}".format, optional=True),
)
"""What each rank did in a step: medians of the steps in which nothing was recorded."""


def format_ranks_table(ranks: Sequence[ObservedRank], width: int) -> list[str]:
    """Return the lines of a table with a row for each rank."""
    return [line for block in table_blocks(known_columns(RANK_COLUMNS, ranks), ranks, width=width) for line in block]


def format_phases_table(account: MemoryAccount, width: int) -> list[str]:
    """Return the lines of a table of a rank's memory: its peak in each phase, by category."""
    columns = [
        Column[PhasePeak](f"MiB, rank {account.rank}", lambda phase: phase.name, right=False),
        Column[PhasePeak]("allocated", lambda phase: phase.peak, format_mib),
        *(category_column(head, group) for head, group in category_groups([account]).items()),
    ]
    return [line for block in table_blocks(columns, account.phases, width=width) for line in block]


def _sent_lines(account: MemoryAccount, width: int) -> list[str]:
    """Return the lines of a table of bytes sent in a step, by group and collective."""
    rows = [
        ("all ranks" if axis == "data" else axis, kind, format_size(size))
        for axis, kinds in account.sent_along.items()
        for kind, size in kinds.items()
    ]
    if not rows:
        return ["", "sent in a step: nothing"] if account.sent_by else []
    return ["", *format_table(("sent in a step by", "collective", "bytes"), rows, width=width).splitlines()]
