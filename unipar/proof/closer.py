"""A closer look at cells that part: the first bad step again, module by module, and what kind of fault fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from unipar.errors import UniparError
from unipar.proof import fault
from unipar.proof.allowance import Allowance
from unipar.proof.facts import mixed
from unipar.proof.jobs import Job
from unipar.proof.judge import Held
from unipar.proof.modules import Parting, partings
from unipar.proof.record import Record, put_together
from unipar.proof.runs import BITS, Runs, bitwise, recut
from unipar.proof.worlds import Result, Worlds, grouped
from unipar.report.verdicts import Finding
from unipar.settled import SettledConfig


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

    def findings(self, found: Mapping[str, Held], allowance: Allowance) -> Iterator[tuple[str, Finding]]:
        """By name of the run that parted."""
        if not found:
            return
        replays = self._replays({_first(held) for held in found.values()})
        jobs = [self._again(name, _first(held)) for name, held in found.items()]
        again = self._worlds.play(grouped(jobs), self._said)
        cases: dict[str, tuple[fault.Case, Finding]] = {}
        for name, held in found.items():
            result = again[name]
            step = _first(held)
            own, exact = replays[step]
            if isinstance(result, UniparError):
                yield name, replace(_finding(held, {}), says=f"the step could not be run again: {result}")
                continue
            run = put_together(result)
            limit = allowance.norms[step - 1] / max(allowance.base.norms[step - 1][0], 1e-300)
            ranks, micros = self._runs.ranks, self._runs.accumulate
            parted = partings(run, own, exact, ranks)
            case = fault.Case(
                run, allowance.base, exact, held, self._settled_of(name).config, ranks, micros, limit, parted, self._own
            )
            finding = _finding(held, parted)
            kind = fault.kind_of(case)
            if kind is not None:
                finding = replace(finding, kind=kind.name, says=kind.says)
            cases[name] = case, finding
        yield from self._settled(cases)

    def _settled_of(self, name: str) -> SettledConfig:
        settled = self._configs[name.removeprefix(BITS)]
        return bitwise(settled) if name.startswith(BITS) else settled

    def _replays(self, steps: set[int]) -> dict[int, tuple[Record, Record]]:
        """In the run's precision and in fp64, up to each first bad step."""
        one, exactly = self._runs.one(), self._runs.one("fp64")
        batches: list[list[Job]] = [[], []]
        for step in sorted(steps):
            batches[0].append(self._runs.replay(f"step {step} again", one, "shares", step=step))
            batches[1].append(self._runs.replay(f"step {step} in fp64", exactly, "shares", step=step, apart=True))
        made = self._worlds.play(batches, self._said, side_by_side=2)
        return {s: (_record(made[f"step {s} again"]), _record(made[f"step {s} in fp64"])) for s in steps}

    def _again(self, name: str, step: int) -> Job:
        return Job(name=name, kind="run", settled=self._settled_of(name), steps=step, trace_at=step)

    def _settled(self, cases: Mapping[str, tuple[fault.Case, Finding]]) -> Iterator[tuple[str, Finding]]:
        """Where as many ranks as microbatches leave two factors possible, other microbatches tell which."""
        micros = self._runs.accumulate
        unsure = [name for name, (_, finding) in cases.items() if " or " in finding.kind]
        other = 1 if micros > 1 else 2
        jobs = [
            Job(name=n, kind="run", settled=recut(self._settled_of(n), other), steps=cases[n][1].step) for n in unsure
        ]
        more = self._worlds.play(grouped(jobs), self._said)
        for name, (case, finding) in cases.items():
            result = more.get(name)
            if isinstance(result, list):
                measured = _factor(replace(case, run=put_together(result)), finding.step)
                kind = fault.settled(case, fault.Kind(finding.kind, finding.says), measured, other)
                yield name, replace(finding, kind=kind.name, says=kind.says)
            else:
                yield name, finding

    def _said(self, name: str, result: Result) -> None:
        self._say(f"{name}: {'failed' if isinstance(result, UniparError) else 'looked at again'}")


def _first(held: Held) -> int:
    assert held.first is not None
    return held.first.step


def _record(result: Result) -> Record:
    if isinstance(result, UniparError):
        raise result
    return put_together(result)


def _factor(case: fault.Case, step: int) -> float:
    """The whole gradient in proportion to one process's, however it is cut."""
    found, whole = fault.gradient_of(case, step), fault.whole_gradient(case, step)
    mix = mixed(found, {(0, 0): whole}, {}, sorted(found))
    return float("nan") if mix is None else mix.parts[0, 0]


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
