"""The proof: references first, then every cell, then a closer look at those that part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unipar.config.settled import SettledConfig
from unipar.errors import Stopped, UniparError
from unipar.results.agreement import measure_agreement
from unipar.results.verdicts import Verdict, Verdicts
from unipar.utils.text import first_few
from unipar.verification import second_look
from unipar.verification.judgement.judge import Judgement, judge
from unipar.verification.judgement.record import RunRecord, combine_ranks, equals_bitwise
from unipar.verification.judgement.tolerance import measure_tolerance
from unipar.verification.runs import (
    BASE_RUN_NAME,
    FP64_RUN_NAME,
    MICROBATCH_REPLAY_NAME,
    MICROS_CONFIGURED,
    SHARES_CONFIGURED,
    SHARES_EXACT,
    SHARES_REPLAY_NAME,
    TASK_PROBE_NAME,
    RunPlan,
)
from unipar.verification.worker.jobs import RunKey
from unipar.verification.world_pool import JobResult, WorldPool, group_jobs_by_library

RANDOM_DATA_TEXT = (
    "the data is random at each read: the same samples, read twice under the same seeds, were others. Draw in the "
    "dataset from the global generators of torch, random or numpy, which unipar seeds for each sample"
)

ShowProgress = Callable[[Verdicts, str], None]


class VerificationSession:
    """One proof from start to end; `now` is what is known so far."""

    def __init__(
        self, runs: RunPlan, worlds: WorldPool, configs: Mapping[str, SettledConfig], now: Verdicts, show: ShowProgress
    ) -> None:
        self._runs, self._worlds, self._configs, self.verdicts, self._show = runs, worlds, dict(configs), now, show
        self._records: dict[RunKey, RunRecord] = {}
        self._task_facts: dict[str, Any] = {}
        self._disagreements: dict[RunKey, Judgement] = {}

    def run(self) -> Verdicts:
        try:
            self._references()
            if not self.verdicts.stopped:
                self._cells()
                self._second_look()
        except (KeyboardInterrupt, Stopped):
            self.verdicts = replace(self.verdicts, interrupted=True)
        return self.verdicts

    # One process

    def _references(self) -> None:
        self._worlds.run_jobs(self._runs.reference_jobs(), self._take_reference, side_by_side=2)
        if not self._task_facts["again"]:
            rows = [replace(row, note="was not run") if row.outcome == "waits" else row for row in self.verdicts.rows]
            self.verdicts = replace(self.verdicts, stopped=RANDOM_DATA_TEXT, rows=rows)
            return
        self.verdicts = replace(self.verdicts, remarks=describe_task(self._task_facts))
        if self._cut_matters:
            self._worlds.run_jobs(self._runs.replay_jobs_cut_alike(), self._take_reference, side_by_side=2)
            self._add_cut_remark()
        self._measure_tolerance()

    def _take_reference(self, key: RunKey, result: JobResult) -> None:
        if isinstance(result, UniparError):
            raise result  # what one process cannot do is no verdict on any cell
        if key == TASK_PROBE_NAME:
            self._task_facts = result[0]
        else:
            self._records[key] = combine_ranks(result)
        self._show(self.verdicts, f"{key}: done")

    @property
    def _cut_matters(self) -> bool:
        return bool(self._task_facts["draws"] or self._task_facts["apart"])

    def _add_cut_remark(self) -> None:
        """One process through other microbatches, held to the replay: not a cell's fault."""
        one, alike = self._records[FP64_RUN_NAME], self._records[SHARES_EXACT].losses
        off = max(abs(a - b) for r in [one, *self._other_cuts] for a, b in zip(r.losses, alike, strict=True))
        why, *others = self.verdicts.remarks[::-1]
        why += f"; one process that cuts batches in another way is off by up to {off:.1e}, so cells are held to one "
        self.verdicts = replace(self.verdicts, remarks=[*others[::-1], why + "that cuts them as they do"])

    @property
    def _other_cuts(self) -> list[RunRecord]:
        """One process through microbatches of other sizes than the config's."""
        return [record for key, record in self._records.items() if key.micro is not None]

    def _measure_tolerance(self) -> None:
        records, exact = self._records, self._records[FP64_RUN_NAME]
        if self._cut_matters:
            base, exact = records[SHARES_CONFIGURED], records[SHARES_EXACT]
            others = [records[MICROS_CONFIGURED], records[SHARES_REPLAY_NAME], records[MICROBATCH_REPLAY_NAME], exact]
        else:
            base = records[BASE_RUN_NAME]
            others = [*self._other_cuts, records[SHARES_REPLAY_NAME], records[MICROBATCH_REPLAY_NAME]]
            if self._runs.config.train.precision != self._runs.precision:
                others.append(exact)  # a stand-in: its own rounding counts as well
        self._tolerance = measure_tolerance(base, others, exact, self._runs.config.train.precision)
        one = {str(key): {"loss": r.losses, "norm": [n[0] for n in r.norms]} for key, r in records.items()}
        allowed = {"loss": self._tolerance.losses, "norm": self._tolerance.norms}
        noise = sorted(self._tolerance.noise)
        said = [f"judged by gradient, for theirs is rounding noise: {', '.join(noise)}"] if noise else []
        self.verdicts = replace(self.verdicts, one=one, allowed=allowed, remarks=[*self.verdicts.remarks, *said])

    # Cells

    def _cells(self) -> None:
        self._worlds.run_jobs(group_jobs_by_library(self._runs.cell_jobs(self._configs)), self._take_cell_result)

    def _take_cell_result(self, key: RunKey, result: JobResult) -> None:
        row = self._verdict(key)
        if isinstance(result, UniparError):
            if row.outcome != "failed":
                self._replace_row(
                    replace(row, outcome="failed", note=str(result)), f"failed: {str(result).splitlines()[0]}"
                )
            return
        record = combine_ranks(result)
        found = judge(record, self._tolerance, self._records[SHARES_REPLAY_NAME])
        if key.bitwise:
            orders = ("shares", self._records[SHARES_REPLAY_NAME]), ("micros", self._records[MICROBATCH_REPLAY_NAME])
            bits = next((order for order, replay in orders if equals_bitwise(record, replay)), "")
            row = replace(row, bits=bits)
            if bits or found.agrees or row.outcome in ("disagrees", "failed"):
                self._replace_row(row, "has the replay's bits" if bits else "adds in an order of its own")
                return
        row = self._row(row, record, found)
        self._replace_row(row, f"{row.outcome}: {row.worst}" if row.outcome == "disagrees" else row.outcome)
        if not found.agrees:
            self._disagreements[key] = found

    def _verdict(self, key: RunKey) -> Verdict:
        """Return what is known so far of the cell that a run is of."""
        return next(row for row in self.verdicts.rows if row.cell == key.cell)

    def _row(self, row: Verdict, record: RunRecord, found: Judgement) -> Verdict:
        near = measure_agreement(record.losses, self._tolerance.base.losses, 1.0)
        return replace(
            row,
            outcome="agrees" if found.agrees else "disagrees",
            digits=near.digits,
            worst=found.worst.says,
            share=found.worst.share,
            losses=record.losses,
            norms=[norms[0] for norms in record.norms],
        )

    def _replace_row(self, row: Verdict, line: str) -> None:
        self.verdicts = replace(
            self.verdicts, rows=[row if old.cell == row.cell else old for old in self.verdicts.rows]
        )
        self._show(self.verdicts, f"{row.cell} {line}")

    # Those that part

    def _second_look(self) -> None:
        looks = second_look.SecondLook(
            self._runs, self._worlds, self._configs, self._task_facts, lambda line: self._show(self.verdicts, line)
        )
        for key, finding in looks.findings(self._disagreements, self._tolerance):
            row = replace(self._verdict(key), finding=finding)
            self._replace_row(row, f"parts at step {finding.step}: {finding.kind or 'no known kind'}")


def describe_task(looked: Mapping[str, Any]) -> list[str]:
    """What a look at the task has shown, as sentences."""
    said: list[str] = []
    if quiet := looked["quiet"]:
        said.append(f"dropout is set to 0 for this proof: {first_few(quiet)}")
    if looked["stream"]:
        said.append(
            "data() returns a stream: its first samples were read once and held, and cells take theirs from these; how "
            "ranks and workers read the stream itself is not compared"
        )
    if len(looked["parts"]) > 1:
        said.append(
            f"the parts ({first_few(looked['parts'])}) have losses of their own, so whether these depend on how a "
            "batch is cut was not looked at; steps are counted one for each part's"
        )
    if looked["optimizer"]:
        said.append(
            "the task's optimizer goes by whole tensors (a step on a tensor is another than on its halves): cells that "
            "keep a tensor in parts cannot give one process's numbers"
        )
    if not looked["readable"]:
        said.append("batches hold no tensors that can be found, so which samples are seen is not compared")
    if looked["draws"]:
        said.append("the loss draws random numbers by itself")
    elif looked["apart"]:
        figures = f"{looked['batch_loss']:.6g} for a batch, {looked['halves_loss']:.6g} for its halves"
        if norms := looked["norms"]:
            said.append(
                f"BatchNorm without sync takes the statistics of a microbatch on one rank ({first_few(norms)}): the "
                f"loss depends on how a batch is cut, {figures}"
            )
        else:
            said.append(
                "the loss of a batch is not the mean of its halves' losses: it goes across samples, or it is a mean "
                f"over something that weight(batch) does not count; {figures}"
            )
    return said
