"""A closer look at cells that part: the first bad step again, module by module, and what kind of fault fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from unipar.config.settled import SettledConfig
from unipar.errors import UniparError
from unipar.results.verdicts import Finding
from unipar.verification.diagnosis import faults
from unipar.verification.diagnosis.gradients import mixed
from unipar.verification.diagnosis.modules import Parting, partings
from unipar.verification.judgement.judge import Held
from unipar.verification.judgement.record import Record, put_together
from unipar.verification.judgement.tolerance import Allowance
from unipar.verification.runs import Runs, bitwise, recut
from unipar.verification.worker.jobs import Job, RunKey
from unipar.verification.world_pool import Result, Worlds, grouped


class Looks:
    """Runs again what is needed, up to the first bad step of each."""

    def __init__(
        self,
        runs: Runs,
        worlds: Worlds,
        configs: Mapping[str, SettledConfig],
        looked: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._runs, self._worlds, self._configs, self._say = runs, worlds, configs, say
        self._own: bool | None = looked["optimizer"]

    def findings(self, found: Mapping[RunKey, Held], allowance: Allowance) -> Iterator[tuple[RunKey, Finding]]:
        """Yield the key and the finding of each run that parted."""
        if not found:
            return
        replays = self._replays({_first(held) for held in found.values()})
        jobs = [self._again(key, _first(held)) for key, held in found.items()]
        again = self._worlds.play(grouped(jobs), self._said)
        cases: dict[RunKey, tuple[faults.Case, faults.Kind | None, Finding]] = {}
        for key, held in found.items():
            result = again[key]
            step = _first(held)
            own, exact = replays[step]
            if isinstance(result, UniparError):
                yield key, replace(_finding(held, {}), says=f"the step could not be run again: {result}")
                continue
            run = put_together(result)
            limit = allowance.norms[step - 1] / max(allowance.base.norms[step - 1][0], 1e-300)
            ranks, micros = self._runs.ranks, self._runs.accumulate
            parted = partings(run, own, exact, ranks)
            case = faults.Case(
                run, allowance.base, exact, held, self._settled_of(key).config, ranks, micros, limit, parted, self._own
            )
            kind = faults.kind_of(case)
            cases[key] = case, kind, _of_kind(_finding(held, parted), kind)
        yield from self._settled(cases)

    def _settled_of(self, key: RunKey) -> SettledConfig:
        settled = self._configs[key.cell]
        return bitwise(settled) if key.bitwise else settled

    def _replays(self, steps: set[int]) -> dict[int, tuple[Record, Record]]:
        """In the run's precision and in fp64, up to each first bad step."""
        one, exactly = self._runs.one(), self._runs.one("fp64")
        keys = {s: (RunKey("shares", step=s), RunKey("shares", step=s, precision="fp64")) for s in sorted(steps)}
        batches = [
            [self._runs.replay(again, one) for again, _ in keys.values()],
            [self._runs.replay(exact, exactly, apart=True) for _, exact in keys.values()],
        ]
        made = self._worlds.play(batches, self._said, side_by_side=2)
        return {s: (_record(made[again]), _record(made[exact])) for s, (again, exact) in keys.items()}

    def _again(self, key: RunKey, step: int) -> Job:
        return Job(key=key, kind="run", settled=self._settled_of(key), steps=step, trace_at=step)

    def _settled(
        self, cases: Mapping[RunKey, tuple[faults.Case, faults.Kind | None, Finding]]
    ) -> Iterator[tuple[RunKey, Finding]]:
        """Where as many ranks as microbatches leave two factors possible, other microbatches tell which."""
        micros = self._runs.accumulate
        other = 1 if micros > 1 else 2
        jobs = [
            Job(key=key, kind="run", settled=recut(self._settled_of(key), other), steps=finding.step)
            for key, (_, _, finding) in cases.items()
            if finding.candidates
        ]
        more = self._worlds.play(grouped(jobs), self._said)
        for key, (case, kind, finding) in cases.items():
            result = more.get(key)
            if kind is not None and isinstance(result, list):
                measured = _factor(replace(case, run=put_together(result)), finding.step)
                yield key, _of_kind(finding, faults.settled(case, kind, measured, other))
            else:
                yield key, finding

    def _said(self, key: RunKey, result: Result) -> None:
        self._say(f"{key}: {'failed' if isinstance(result, UniparError) else 'looked at again'}")


def _first(held: Held) -> int:
    assert held.first is not None
    return held.first.step


def _record(result: Result) -> Record:
    if isinstance(result, UniparError):
        raise result
    return put_together(result)


def _factor(case: faults.Case, step: int) -> float:
    """The whole gradient in proportion to one process's, however it is cut."""
    found, whole = faults.gradient_of(case, step), faults.whole_gradient(case, step)
    mix = mixed(found, {(0, 0): whole}, {}, sorted(found))
    return float("nan") if mix is None else mix.parts[0, 0]


def _of_kind(finding: Finding, kind: faults.Kind | None) -> Finding:
    """Return the finding with the kind of fault that fits; as it is where none does."""
    return finding if kind is None else replace(finding, kind=kind.name, says=kind.says, candidates=kind.candidates)


def _finding(held: Held, found: Mapping[str, Parting]) -> Finding:
    first = held.first
    assert first is not None
    shown = {way: f"{p.module} (rank {p.rank}, microbatch {p.micro + 1})" for way, p in found.items()}
    names = list(dict.fromkeys(name for name, _ in held.parted))
    return Finding(
        step=first.step,
        what=first.what,
        parameter=names[0] if names else "",
        parameters=len(names),
        forward=shown.get("forward", ""),
        backward=shown.get("backward", ""),
    )
