"""The proof: references first, then every cell, then a closer look at those that part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unipar.config.settled import SettledConfig
from unipar.errors import Stopped, UniparError
from unipar.results.agreement import agreement
from unipar.results.verdicts import Verdict, Verdicts
from unipar.utils.text import first_few
from unipar.verification import second_look
from unipar.verification.judgement.judge import Held, judge
from unipar.verification.judgement.record import Record, put_together, same_bits
from unipar.verification.judgement.tolerance import measured
from unipar.verification.runs import (
    BASE,
    EXACT,
    LOOK,
    MICROS,
    MICROS_CONFIGURED,
    SHARES,
    SHARES_CONFIGURED,
    SHARES_EXACT,
    Runs,
)
from unipar.verification.worker.jobs import RunKey
from unipar.verification.world_pool import Result, Worlds, grouped

RANDOM = (
    "the data is random at each read: the same samples, read twice under the same seeds, were others. Draw in the "
    "dataset from the global generators of torch, random or numpy, which unipar seeds for each sample"
)

Show = Callable[[Verdicts, str], None]


class Proof:
    """One proof from start to end; `now` is what is known so far."""

    def __init__(
        self, runs: Runs, worlds: Worlds, configs: Mapping[str, SettledConfig], now: Verdicts, show: Show
    ) -> None:
        self._runs, self._worlds, self._configs, self.now, self._show = runs, worlds, dict(configs), now, show
        self._records: dict[RunKey, Record] = {}
        self._looked: dict[str, Any] = {}
        self._found: dict[RunKey, Held] = {}

    def run(self) -> Verdicts:
        try:
            self._references()
            if not self.now.stopped:
                self._cells()
                self._second_look()
        except (KeyboardInterrupt, Stopped):
            self.now = replace(self.now, interrupted=True)
        return self.now

    # One process

    def _references(self) -> None:
        self._worlds.play(self._runs.references(), self._reference, side_by_side=2)
        if not self._looked["again"]:
            rows = [replace(row, note="was not run") if row.outcome == "waits" else row for row in self.now.rows]
            self.now = replace(self.now, stopped=RANDOM, rows=rows)
            return
        self.now = replace(self.now, remarks=remarks(self._looked))
        if self._cut_matters:
            self._worlds.play(self._runs.cut_alike(), self._reference, side_by_side=2)
            self._say_how_much()
        self._allow()

    def _reference(self, key: RunKey, result: Result) -> None:
        if isinstance(result, UniparError):
            raise result  # what one process cannot do is no verdict on any cell
        if key == LOOK:
            self._looked = result[0]
        else:
            self._records[key] = put_together(result)
        self._show(self.now, f"{key}: done")

    @property
    def _cut_matters(self) -> bool:
        return bool(self._looked["draws"] or self._looked["apart"])

    def _say_how_much(self) -> None:
        """One process through other microbatches, held to the replay: not a cell's fault."""
        one, alike = self._records[EXACT], self._records[SHARES_EXACT].losses
        off = max(abs(a - b) for r in [one, *self._other_cuts] for a, b in zip(r.losses, alike, strict=True))
        why, *others = self.now.remarks[::-1]
        why += f"; one process that cuts batches in another way is off by up to {off:.1e}, so cells are held to one "
        self.now = replace(self.now, remarks=[*others[::-1], why + "that cuts them as they do"])

    @property
    def _other_cuts(self) -> list[Record]:
        """One process through microbatches of other sizes than the config's."""
        return [record for key, record in self._records.items() if key.micro is not None]

    def _allow(self) -> None:
        records, exact = self._records, self._records[EXACT]
        if self._cut_matters:
            base, exact = records[SHARES_CONFIGURED], records[SHARES_EXACT]
            others = [records[MICROS_CONFIGURED], records[SHARES], records[MICROS], exact]
        else:
            base = records[BASE]
            others = [*self._other_cuts, records[SHARES], records[MICROS]]
            if self._runs.config.train.precision != self._runs.precision:
                others.append(exact)  # a stand-in: its own rounding counts as well
        self._allowance = measured(base, others, exact, self._runs.config.train.precision)
        one = {str(key): {"loss": r.losses, "norm": [n[0] for n in r.norms]} for key, r in records.items()}
        allowed = {"loss": self._allowance.losses, "norm": self._allowance.norms}
        noise = sorted(self._allowance.noise)
        said = [f"judged by gradient, for theirs is rounding noise: {', '.join(noise)}"] if noise else []
        self.now = replace(self.now, one=one, allowed=allowed, remarks=[*self.now.remarks, *said])

    # Cells

    def _cells(self) -> None:
        self._worlds.play(grouped(self._runs.cells(self._configs)), self._cell)

    def _cell(self, key: RunKey, result: Result) -> None:
        row = self._verdict(key)
        if isinstance(result, UniparError):
            if row.outcome != "failed":
                self._put(replace(row, outcome="failed", note=str(result)), f"failed: {str(result).splitlines()[0]}")
            return
        record = put_together(result)
        found = judge(record, self._allowance, self._records[SHARES])
        if key.bitwise:
            orders = ("shares", self._records[SHARES]), ("micros", self._records[MICROS])
            bits = next((order for order, replay in orders if same_bits(record, replay)), "")
            row = replace(row, bits=bits)
            if bits or found.agrees or row.outcome in ("disagrees", "failed"):
                self._put(row, "has the replay's bits" if bits else "adds in an order of its own")
                return
        row = self._row(row, record, found)
        self._put(row, f"{row.outcome}: {row.worst}" if row.outcome == "disagrees" else row.outcome)
        if not found.agrees:
            self._found[key] = found

    def _verdict(self, key: RunKey) -> Verdict:
        """Return what is known so far of the cell that a run is of."""
        return next(row for row in self.now.rows if row.cell == key.cell)

    def _row(self, row: Verdict, record: Record, found: Held) -> Verdict:
        near = agreement(record.losses, self._allowance.base.losses, 1.0)
        return replace(
            row,
            outcome="agrees" if found.agrees else "disagrees",
            digits=near.digits,
            worst=found.worst.says,
            share=found.worst.share,
            losses=record.losses,
            norms=[norms[0] for norms in record.norms],
        )

    def _put(self, row: Verdict, line: str) -> None:
        self.now = replace(self.now, rows=[row if old.cell == row.cell else old for old in self.now.rows])
        self._show(self.now, f"{row.cell} {line}")

    # Those that part

    def _second_look(self) -> None:
        looks = second_look.Looks(
            self._runs, self._worlds, self._configs, self._looked, lambda line: self._show(self.now, line)
        )
        for key, finding in looks.findings(self._found, self._allowance):
            row = replace(self._verdict(key), finding=finding)
            self._put(row, f"parts at step {finding.step}: {finding.kind or 'no known kind'}")


def remarks(looked: Mapping[str, Any]) -> list[str]:
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
