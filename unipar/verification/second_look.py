"""Second look at strategies that disagree: rerun the first bad step, compare modules, and classify the fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unipar.config.settled import SettledConfig
from unipar.errors import UniparError
from unipar.results.verdicts import Finding
from unipar.verification.diagnosis import faults
from unipar.verification.diagnosis.case import Fault, FaultCase, norm_factor, run_gradient, whole_gradient
from unipar.verification.diagnosis.modules import ModuleDifference, find_loss_differences, find_module_differences
from unipar.verification.diagnosis.sketched_gradients import fit_gradient_mix
from unipar.verification.judgement.judge import Judgement
from unipar.verification.judgement.record import RunRecord, combine_ranks
from unipar.verification.judgement.tolerance import Tolerance
from unipar.verification.runs import RunPlan, with_accumulation, with_bitwise_arithmetic
from unipar.verification.worker.jobs import Job, RunKey
from unipar.verification.world_pool import JobResult, WorldPool, group_jobs_by_library


class SecondLook:
    """Reruns of the runs that disagree, each up to its first bad step, and the diagnosis of each."""

    def __init__(
        self,
        runs: RunPlan,
        worlds: WorldPool,
        task_facts: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._runs, self._worlds, self._say = runs, worlds, say
        self._optimizer_uses_whole_tensors: bool | None = task_facts["optimizer"]

    def findings(
        self, judgements: Mapping[RunKey, Judgement], tolerance_of: Callable[[RunKey], Tolerance]
    ) -> Iterator[tuple[RunKey, Finding]]:
        """Yield the key and the finding of each run that disagrees."""
        if not judgements:
            return
        replays = self._replays({(self._shares_of(key), _first_bad_step(judged)) for key, judged in judgements.items()})
        jobs = [self._rerun_job(key, _first_bad_step(judgement)) for key, judgement in judgements.items()]
        again = self._worlds.run_jobs(group_jobs_by_library(jobs), self._show_result)
        cases: dict[RunKey, tuple[FaultCase, Fault | None, Finding]] = {}
        for key, judgement in judgements.items():
            result = again[key]
            step, tolerance = _first_bad_step(judgement), tolerance_of(key)
            own, exact = replays[self._shares_of(key), step]
            if isinstance(result, UniparError):
                yield key, _create_finding(judgement, {}).changed(says=f"the step could not be run again: {result}")
                continue
            run = combine_ranks(result)
            limit = tolerance.norms[step - 1] / max(tolerance.base.norms[step - 1][0], 1e-300)
            settled = self._settled_of(key)
            shares = settled.sizes.ranks
            differences = find_module_differences(run, own, exact, shares, settled.strategy.axes)
            case = FaultCase(
                run,
                tolerance.base,
                own,
                exact,
                judgement,
                settled,
                limit,
                differences,
                find_loss_differences(run, own, exact, shares),
                self._optimizer_uses_whole_tensors,
            )
            kind = faults.classify_fault(case)
            cases[key] = case, kind, _of_kind(_create_finding(judgement, differences), kind)
        yield from self._resolve_factors(cases)

    def _settled_of(self, key: RunKey) -> SettledConfig:
        settled = self._runs.strategies[key.strategy]
        return with_bitwise_arithmetic(settled) if key.bitwise else settled

    def _shares_of(self, key: RunKey) -> int:
        return self._runs.strategies[key.strategy].sizes.ranks

    def _replays(self, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[RunRecord, RunRecord]]:
        """Return two replays for each number of shares and step, up to that step: as configured, and in fp64."""
        one, exactly = self._runs.one_process_config(), self._runs.one_process_config(self._runs.exact_precision)
        keys = {(shares, step): self._runs.step_replay_keys(shares, step) for shares, step in sorted(wanted)}
        batches = [
            [self._runs.replay_job(again, one) for again, _ in keys.values()],
            [self._runs.replay_job(exact, exactly, per_microbatch=True) for _, exact in keys.values()],
        ]
        results = self._worlds.run_jobs(batches, self._show_result, side_by_side=2)
        return {
            place: (_record_or_raise(results[again]), _record_or_raise(results[exact]))
            for place, (again, exact) in keys.items()
        }

    def _rerun_job(self, key: RunKey, step: int) -> Job:
        return Job(key=key, kind="run", settled=self._settled_of(key), steps=step, trace_at=step)

    def _resolve_factors(
        self, cases: Mapping[RunKey, tuple[FaultCase, Fault | None, Finding]]
    ) -> Iterator[tuple[RunKey, Finding]]:
        """Yield all findings; if two factors fit (as many shares as microbatches), rerun to tell which one."""
        others = {key: 1 if case.accumulate > 1 else 2 for key, (case, _, _) in cases.items()}
        jobs = [
            Job(key=key, kind="run", settled=with_accumulation(self._settled_of(key), others[key]), steps=finding.step)
            for key, (_, _, finding) in cases.items()
            if finding.candidates
        ]
        more = self._worlds.run_jobs(group_jobs_by_library(jobs), self._show_result)
        for key, (case, kind, finding) in cases.items():
            result = more.get(key)
            if kind is not None and isinstance(result, list):
                measured = _gradient_factor(replace(case, run=combine_ranks(result)), finding.step, kind.parameters)
                yield key, _of_kind(finding, faults.resolve_fault(case, kind, measured, others[key]))
            else:
                yield key, finding

    def _show_result(self, key: RunKey, result: JobResult) -> None:
        self._say(f"{key}: {'failed' if isinstance(result, UniparError) else 'rerun'}")


def _first_bad_step(judgement: Judgement) -> int:
    assert judgement.first is not None
    return judgement.first.step


def _record_or_raise(result: JobResult) -> RunRecord:
    if isinstance(result, UniparError):
        raise result
    return combine_ranks(result)


def _gradient_factor(case: FaultCase, step: int, names: Sequence[str]) -> float:
    """Return the factor between the run's gradient, of these parameters or of all, and that of one process.

    It is that between their norms if the optimizer's state does not tell the gradient.
    """
    gradient, expected = run_gradient(case, step), whole_gradient(case, step)
    mix = fit_gradient_mix(gradient, {(0, 0): expected}, {}, sorted(names or gradient))
    return norm_factor(case, step) if mix is None else mix.parts[0, 0]


def _of_kind(finding: Finding, kind: Fault | None) -> Finding:
    """Return the finding with the kind of fault that fits, or unchanged if none does."""
    return finding if kind is None else finding.changed(kind=kind.name, says=kind.says, candidates=kind.candidates)


def _create_finding(judgement: Judgement, differences: Mapping[str, ModuleDifference]) -> Finding:
    first = judgement.first
    assert first is not None
    shown = {way: f"{p.module} (rank {p.rank}, microbatch {p.micro + 1})" for way, p in differences.items()}
    names = list(dict.fromkeys(name for name, _ in judgement.differing))
    return Finding(
        step=first.step,
        what=first.what,
        parameter=names[0] if names else "",
        parameters=len(names),
        forward=shown.get("forward", ""),
        backward=shown.get("backward", ""),
    )
