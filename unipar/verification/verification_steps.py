"""Steps of a verification: references first, then every strategy, then a second look at those that disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unipar.backend.precision import FP8_RECIPES
from unipar.checkpoint.format.names import step_folder_name
from unipar.config.sections.strategy import Axes
from unipar.config.settled import SettledConfig
from unipar.errors import Inconsistent, Stopped, UniparError, Unsupported
from unipar.results.loss_agreement import measure_agreement
from unipar.results.verdicts import CutDependence, Finding, Verdict, Verdicts
from unipar.utils.address import Location
from unipar.utils.text import first_few
from unipar.verification import second_look
from unipar.verification.diagnosis.expert_faults import NEAR_TIE
from unipar.verification.diagnosis.mesh_faults import classify_masks
from unipar.verification.judgement.judge import Judgement, judge
from unipar.verification.judgement.record import RunRecord, combine_ranks, equals_bitwise, join_halves
from unipar.verification.judgement.tolerance import Tolerance, measure_tolerance, widen
from unipar.verification.remarks import (
    CUT_WAYS_OUT,
    DROPOUT_REMARK,
    describe_fp8,
    describe_task,
    kind_of_cut_dependence,
)
from unipar.verification.runs import (
    BASE_RUN_NAME,
    TASK_PROBE_NAME,
    RunPlan,
)
from unipar.verification.undecided import run_with_choices
from unipar.verification.worker.jobs import RunKey
from unipar.verification.world_pool import JobResult, WorldPool, group_jobs_by_library

RANDOM_DATA_TEXT = (
    "the data is random at each read: the same samples, read twice under the same seeds, were different. In the "
    "dataset, draw from the global generators of torch, random or numpy, which unipar seeds for each sample"
)
"""Reason why no verdict is possible on data that differs at each read."""

CHECKPOINTS = "checkpoints"
"""Folder, beside those of the worlds, for the state that one strategy saves."""

ShowProgress = Callable[[Verdicts, str], None]
"""Function that shows the verdicts so far and one line of progress."""


class VerificationSession:
    """One verification from start to end; `verdicts` holds what is known so far."""

    def __init__(self, runs: RunPlan, worlds: WorldPool, now: Verdicts, show: ShowProgress) -> None:
        self._runs, self._worlds, self.verdicts, self._show = runs, worlds, now, show
        self._records: dict[RunKey, RunRecord] = {}
        self._task_facts: dict[str, Any] = {}
        self._disagreements: dict[RunKey, Judgement] = {}
        self._errors_by_micro: dict[int, str] = {}
        """Errors of runs of one process with other sizes of a microbatch."""

        self._fp8: dict[RunKey, dict[str, str]] = {}
        """What multiplied in linear layers in fp8, by name, in the runs of one process."""

        self._tolerances: dict[tuple[int, Axes], Tolerance] = {}
        """Tolerances by number of shares of a batch, and by the axes along which ranks add up parts."""

    def run(self) -> Verdicts:
        """Run all parts and return the verdicts; after an interrupt, those known until then."""
        try:
            self._set_numbers()
            self.run_references()
            if not self.verdicts.stopped and self._runs.halfway is not None:
                self._resumed_strategies(self._runs.halfway)
            elif not self.verdicts.stopped:
                self._strategies()
                self._dropout()
                self._second_look()
        except (KeyboardInterrupt, Stopped):
            self.verdicts = self.verdicts.changed(interrupted=True)
        return self.verdicts

    # One process

    def _set_numbers(self) -> None:
        """On a device, settle what decides the last digits there: first find what has no deterministic kernel."""
        self._worlds.numbers = self._runs.numbers
        if self._runs.numbers is not None:
            self._worlds.run_jobs([[self._runs.kernel_search()]], self._take_kernels)

    def _take_kernels(self, key: RunKey, result: JobResult) -> None:
        if isinstance(result, UniparError):
            raise result  # the task fails as configured
        assert self._runs.numbers is not None
        numbers = replace(self._runs.numbers, unrepeatable=tuple(result[0]["unrepeatable"]))
        self._worlds.numbers = numbers
        self._runs = replace(self._runs, numbers=numbers)
        sentences = [numbers.remark()] if numbers.unrepeatable else []
        if result[0]["tf32"]:
            sentences.append("the task allows TF32 for products of fp32 matrices; it is off in this verification")
        remarks = [*self.verdicts.remarks, *sentences]
        self.verdicts = self.verdicts.changed(
            numbers=numbers.settings(), unrepeatable=numbers.unrepeatable, remarks=remarks
        )
        self._show(self.verdicts, f"{key}: done")

    def run_references(self) -> None:
        """Run what strategies are compared with."""
        self._worlds.run_jobs(self._runs.reference_jobs(), self._take_reference, side_by_side=2)
        if not self._task_facts["again"]:
            rows = [row.changed(note="was not run") if row.outcome == "waits" else row for row in self.verdicts.rows]
            self.verdicts = self.verdicts.changed(stopped=RANDOM_DATA_TEXT, rows=rows)
            return
        cuts = [
            f"one process cannot run with microbatches of {micro} ({error}), so such a run is not part of the spread"
            for micro, error in self._errors_by_micro.items()
        ]
        remarks = [*self.verdicts.remarks, *cuts, *describe_task(self._task_facts)]
        self.verdicts = self.verdicts.changed(remarks=remarks)
        further = self._runs.further_reference_jobs(cut_matters=self._cut_matters)
        self._worlds.run_jobs(further, self._take_reference, side_by_side=2)
        if self._cut_matters:
            self._add_cut_remark()
        if not self._runs.fp64:
            self._add_precision_remark()
        if self._runs.precision in FP8_RECIPES:
            self._add_fp8_remark()
        self._measure_tolerances()

    def _add_fp8_remark(self) -> None:
        """Say which linear layers multiply in fp8, by what, and how many digits of the loss that costs."""
        base = self._base_run(self._runs.share_counts[0])
        exact = self._runs.exact_run
        near = measure_agreement(self._records[base].losses, self._records[exact].losses, 1.0)
        self.verdicts = self.verdicts.changed(
            remarks=[
                *self.verdicts.remarks,
                describe_fp8(self._runs.precision, self._fp8[base], str(exact), near.digits),
            ]
        )

    def _take_reference(self, key: RunKey, result: JobResult) -> None:
        if isinstance(result, UniparError):
            raise result  # without the references there is no verdict on any strategy
        if key == TASK_PROBE_NAME:
            self._task_facts = result[0]
        elif "unable" in result[0]:
            # that the task works as configured is known when that run has come to its end; if it fails, its error ends
            # the verification
            error: str = result[0]["unable"]
            if key.kind != "one process":
                sentence = f"{key} failed ({error}), so such a run is not part of the spread"
                self.verdicts = self.verdicts.changed(remarks=[*self.verdicts.remarks, sentence])
            elif key.micro is None:
                self._runs = replace(self._runs, fp64=False)
                self.verdicts = self.verdicts.changed(fp64_error=error)
            else:
                self._errors_by_micro[key.micro] = error
            self._show(self.verdicts, f"{key}: cannot run: {error}")
            return
        else:
            self._records[key] = combine_ranks(result)
            self._fp8[key] = result[0]["fp8"]
        self._show(self.verdicts, f"{key}: done")

    @property
    def _cut_matters(self) -> bool:
        return bool(self._task_facts["draws"] or self._task_facts["apart"])

    def _add_cut_remark(self) -> None:
        """Note by how much one process differs if it splits batches in another way, in the last remark too."""
        exact = self._runs.exact_shares(self._runs.share_counts[0])
        one, alike = self._records[self._runs.exact_run], self._records[exact].losses
        off = max(abs(a - b) for r in [one, *self._other_cuts] for a, b in zip(r.losses, alike, strict=True))
        why, *others = self.verdicts.remarks[::-1]
        why += (
            f"; one process that splits batches in another way is off by up to {off:.1e}, so strategies are compared "
            "with one that splits them as they do"
        )
        self.verdicts = self.verdicts.changed(remarks=[*others[::-1], why])
        if kind := kind_of_cut_dependence(self._task_facts):
            dependence = CutDependence(kind=kind, off=off, micro=self._runs.fixed_micro, way_out=CUT_WAYS_OUT[kind])
            self.verdicts = self.verdicts.changed(cut_dependence=dependence)

    def _add_precision_remark(self) -> None:
        """Say that the model cannot run in fp64, and what is done instead."""
        remark = (
            f"the model cannot run in fp64 ({self.verdicts.fp64_error}), and runs on the same microbatches in "
            f"{self._runs.precision}: the spread comes from other microbatches, other orders of addition and weights "
            "that were changed in the last place"
        )
        self.verdicts = self.verdicts.changed(remarks=[remark, *self.verdicts.remarks])

    @property
    def _other_cuts(self) -> list[RunRecord]:
        """Records of one process with microbatches of other sizes than the config's."""
        return [record for key, record in self._records.items() if key.micro is not None]

    def _measure_tolerances(self) -> None:
        first = self._runs.share_counts[0]
        tolerance = self._tolerance(first, Axes())
        for settled in self._runs.strategies.values():
            self._tolerance(settled.sizes.ranks, settled.strategy.axes)
        one = {str(key): {"loss": r.losses, "norm": [n[0] for n in r.norms]} for key, r in self._records.items()}
        noise = sorted(tolerance.noise)
        remarks = list(self.verdicts.remarks)
        if noise:
            remarks.append(f"judged by gradient, because their gradients are rounding noise: {', '.join(noise)}")
        if self._runs.config.train.narrow_moments is not None:
            remarks.append(
                "moments of few bits: where a sum rounds otherwise, one becomes a neighbour of what it is in one "
                "process; as many elements may be as far off as in all tensors of those runs together"
            )
        allowed, base = allowed_by_quantity(tolerance), self._base_run(first)
        self.verdicts = self.verdicts.changed(one=one, base=str(base), allowed=allowed, remarks=remarks)

    def _base_run(self, shares: int) -> RunKey:
        """Return the key of the run with which strategies are compared that split a batch into this many shares."""
        return self._runs.replays(shares).configured_shares if self._cut_matters else BASE_RUN_NAME

    def _tolerance(self, shares: int, axes: Axes) -> Tolerance:
        """Return the tolerance of strategies with this many shares and these axes, measured at the first call."""
        if (shares, axes) in self._tolerances:
            return self._tolerances[shares, axes]
        records, keys = self._records, self._runs.replays(shares)
        base, exact = records[self._base_run(shares)], records[self._runs.exact_run]
        replays = [keys.bitwise_shares, keys.bitwise_micros, *keys.in_parts(axes)]
        alike = [records[key] for key in replays if key in records]
        repeats = [records[key] for key in self._runs.repeats if key in records]
        others = list(alike)
        if self._cut_matters:
            exact = records[self._runs.exact_shares(shares)]
            alike += [base, exact, *(records[k] for k in (keys.configured_micros,) if k in records)]
            others = list(alike)
        else:
            others += self._other_cuts
            if self._runs.config.train.precision != self._runs.precision or base.narrow:
                others.append(exact)  # where another precision stands in, or in part, its own rounding counts as well
        if not self._runs.fp64:
            others.append(records[keys.perturbed])
        others += repeats
        measured = measure_tolerance(base, others, exact, self._runs.config.train.precision, alike)
        self._tolerances[shares, axes] = measured
        return measured

    def _tolerance_of(self, key: RunKey) -> Tolerance:
        """Return the tolerance of a run of a strategy."""
        settled = self._runs.strategies[key.strategy]
        return self._tolerance(settled.sizes.ranks, settled.strategy.axes)

    # Strategies

    def _strategies(self) -> None:
        self._worlds.run_jobs(group_jobs_by_library(self._runs.strategy_jobs()), self._take_strategy_result)

    def _resumed_strategies(self, halfway: int) -> None:
        """Have every strategy go on from a checkpoint: the one that was given, or one that a strategy saves halfway."""
        path, source = self._runs.checkpoint, f"the state in {self._runs.checkpoint}, of step {halfway}"
        if path is None:
            folder = self._worlds.folder / CHECKPOINTS
            self._worlds.run_jobs([[self._runs.saving_job(folder)]], self._take_first_half)
            path = folder / step_folder_name(halfway)
            source = f"the state that {self._runs.saver} saved after step {halfway}"
        remark = (
            f"every strategy goes on from {source}, and is compared from there on with one process that was not "
            "interrupted"
        )
        self.verdicts = self.verdicts.changed(remarks=[remark, *self.verdicts.remarks])
        self.go_on_from(path)

    def go_on_from(self, checkpoint: Location) -> None:
        """Have every strategy go on from a checkpoint, and judge it; the references must have run."""
        jobs = self._runs.resuming_jobs(checkpoint)
        self._worlds.run_jobs(group_jobs_by_library(jobs), self._take_strategy_result)

    def _take_first_half(self, key: RunKey, result: JobResult) -> None:
        if isinstance(result, UniparError):
            raise result
        if counted := result[0]["counted"]:
            remark = (
                f"{first_few(counted)} changed while it trained and are not in a checkpoint, which holds tensors: make "
                "them buffers, or return them in the task's state() and take them back in load_state(state)"
            )
            self.verdicts = self.verdicts.changed(remarks=[*self.verdicts.remarks, remark])
        self._show(self.verdicts, f"{key}: done")

    def _take_strategy_result(self, key: RunKey, result: JobResult) -> None:
        row = self._verdict(key)
        if isinstance(result, UniparError):
            if row.outcome not in ("refused", "failed"):
                self._note_error(row, result)
            return
        if unequal := sorted({name for rank in result for name in rank["unequal"]}):
            note = f"after it was loaded, {first_few(unequal)} is not what the checkpoint holds"
            self._replace_row(row.changed(outcome="disagrees", worst=note, note=note), f"disagrees: {note}")
            return
        if left := self._left_fp8(result):
            if row.outcome not in ("refused", "failed"):
                self._note_error(row, Inconsistent(left))
            return
        record, shares = combine_ranks(result), self._runs.strategies[key.strategy].sizes.ranks
        replays = self._runs.replays(shares)
        if key.half:
            base = self._records[self._base_run(shares)]
            record = join_halves(base, self._records[replays.bitwise_shares], record)
        judgement = judge(record, self._tolerance_of(key), self._records[replays.bitwise_shares])
        if key.bitwise:
            orders = replays.bitwise_shares, replays.bitwise_micros
            alike = (k.kind for k in orders if k in self._records and equals_bitwise(record, self._records[k]))
            bits = next(alike, "")
            row = row.changed(bits=bits)
            if bits or judgement.agrees or row.outcome in ("disagrees", "refused", "failed"):
                self._replace_row(
                    row,
                    "is bit-for-bit equal to the replay"
                    if bits
                    else "sums in its own order, so it is not bit-for-bit equal to a replay",
                )
                return
        row = self._row(key, record, judgement)
        self._replace_row(row, f"{row.outcome}: {row.worst}" if row.outcome == "disagrees" else row.outcome)
        if not judgement.agrees:
            self._disagreements[key] = judgement

    def _left_fp8(self, result: Sequence[Mapping[str, Any]]) -> str:
        """Return which linear layers multiply in fp8 in one process and not in a strategy; "" if there are none."""
        ran = {name: kernel for rank in result for name, kernel in rank["fp8"].items()}
        left = [sentence for rank in result for sentence in rank["left_fp8"]]
        left += [
            f"{name} ran {ran.get(name, 'nothing')}, not {kernel}"
            for name, kernel in self._fp8.get(BASE_RUN_NAME, {}).items()
            if ran.get(name) != kernel and not any(sentence.startswith(f"{name} ") for sentence in left)
        ]
        return f"multiplied in fp8 in one process, and not here: {first_few([*dict.fromkeys(left)])}" if left else ""

    def _verdict(self, key: RunKey) -> Verdict:
        """Return the verdict so far on the strategy of a run."""
        return next(row for row in self.verdicts.rows if row.strategy == key.strategy)

    def _row(self, key: RunKey, record: RunRecord, judgement: Judgement) -> Verdict:
        tolerance, shares = self._tolerance_of(key), self._runs.strategies[key.strategy].sizes.ranks
        near = measure_agreement(record.losses, tolerance.base.losses, 1.0)
        base, allowed = str(self._base_run(shares)), allowed_by_quantity(tolerance)
        return self._verdict(key).changed(
            base="" if base == self.verdicts.base else base,
            allowed={} if allowed == self.verdicts.allowed else allowed,
            outcome="agrees" if judgement.agrees else "disagrees",
            digits=near.digits,
            worst=judgement.worst.says,
            share=judgement.worst.share,
            shares=judgement.shares,
            losses=record.losses,
            norms=[norms[0] for norms in record.norms],
        )

    def _note_error(self, row: Verdict, error: UniparError, when: str = "") -> None:
        """Note why a strategy has no result: Unsupported is its engine's refusal, any other error a failure."""
        refused = isinstance(error, Unsupported)
        outcome, reason = ("refused", "; ".join(error.reasons)) if refused else ("failed", str(error))
        note = f"{when}{reason}"
        self._replace_row(row.changed(outcome=outcome, note=note), f"{outcome}: {note.splitlines()[0]}")

    def _replace_row(self, row: Verdict, line: str) -> None:
        self.verdicts = self.verdicts.changed(
            rows=[row if old.strategy == row.strategy else old for old in self.verdicts.rows]
        )
        self._show(self.verdicts, f"{row.strategy} {line}")

    def _dropout(self) -> None:
        """Run strategies whose ranks share the work once more with dropout: its masks must be those of one process."""
        agreeing = [row.strategy for row in self.verdicts.rows if row.outcome == "agrees"]
        strategies = [name for name in agreeing if self._runs.strategies[name].strategy.axes.split]
        if not (strategies and self._task_facts["quiet"]):
            return
        replays, runs = self._runs.dropout_jobs(strategies)
        self._worlds.run_jobs([replays], self._take_reference)
        self._worlds.run_jobs(group_jobs_by_library(runs), self._take_dropout_result)
        was = next(remark for remark in self.verdicts.remarks if remark.startswith(DROPOUT_REMARK))
        now = f"{was}; strategies whose ranks share the work on the same samples were run once more with it"
        remarks = [now if remark == was else remark for remark in self.verdicts.remarks]
        self.verdicts = self.verdicts.changed(remarks=remarks)

    def _dropout_keys(self, settled: SettledConfig) -> list[RunKey]:
        """Return the keys of the replays with dropout that drew the same masks: as configured, finest, and others."""
        first, *others = self._runs.dropout_replays(settled)
        records = self._records
        same = [key for key in others if key in records and records[key].masks == records[first].masks]
        return [first, *(same or [first])]

    def _take_dropout_result(self, key: RunKey, result: JobResult) -> None:
        row = self._verdict(key)
        if isinstance(result, UniparError):
            self._note_error(row, result, "with dropout: ")
            return
        record, settled = combine_ranks(result), self._runs.strategies[key.strategy]
        replay, exact, *others = [self._records[k] for k in self._dropout_keys(settled)]
        own = measure_tolerance(replay, [exact, *others], exact, settled.config.train.precision, [replay, exact])
        judgement = judge(record, widen(own, self._tolerance_of(key)), replay)
        if judgement.first is not None:
            fault = classify_masks(record, replay)
            first = judgement.first
            finding = Finding(step=first.step, what=first.what, kind=fault.name, says=fault.says, traced=False)
            worst = f"with dropout, {judgement.worst.says}"
            row = row.changed(outcome="disagrees", worst=worst, share=judgement.worst.share, finding=finding, bits="")
        self._replace_row(row, f"with dropout {row.outcome}")

    # Strategies that disagree

    def _second_look(self) -> None:
        looks = second_look.SecondLook(
            self._runs, self._worlds, self._task_facts, lambda line: self._show(self.verdicts, line)
        )
        for key, finding in looks.findings(self._disagreements, self._tolerance_of):
            row = self._verdict(key).changed(finding=finding)
            self._replace_row(row, f"differs from step {finding.step} on: {finding.kind or 'unknown kind of fault'}")
        rows = [row for row in self.verdicts.rows if row.finding is not None and row.finding.kind == NEAR_TIE]
        if rows:
            self._decide_ties([row.strategy for row in rows])

    def _decide_ties(self, strategies: Sequence[str]) -> None:
        """Judge these strategies once more, with the experts that one process chooses where routers are undecided."""
        runs = run_with_choices(self._runs, self._worlds, strategies, lambda line: self._show(self.verdicts, line))
        for name, record, tokens in runs:
            key = RunKey("strategy", name)
            replay = self._records[self._runs.replays(self._runs.strategies[name].sizes.ranks).bitwise_shares]
            judgement, before = judge(record, self._tolerance_of(key), replay), self._verdict(key)
            if judgement.agrees:
                row = self._row(key, record, judgement).changed(finding=None, undecided=tokens)
                self._replace_row(row, f"agrees, {row.reservation}")
            elif before.finding is not None:
                says = f"{before.finding.says}; with the experts of one process it disagrees all the same: "
                finding = before.finding.changed(says=says + judgement.worst.says)
                self._replace_row(before.changed(finding=finding), f"disagrees all the same: {judgement.worst.says}")


def allowed_by_quantity(tolerance: Tolerance) -> dict[str, list[float]]:
    """Return the allowed difference of a loss and of a norm, by step."""
    return {"loss": tolerance.losses, "norm": tolerance.norms}
