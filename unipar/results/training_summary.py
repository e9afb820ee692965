"""`TrainingSummary`: what an observed command, a run, or a strategy of a comparison did, in one form for all three."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal

from unipar.config import Strategy
from unipar.errors import ConfigError, ReportError
from unipar.memory.account import MemoryAccount, PhasePeak, read_accounts
from unipar.results.memory_tables import largest_account
from unipar.results.observation import Observation, TrainingFinding
from unipar.results.observation_table import describe_steps, sent_rows
from unipar.results.observed_rank import ObservedRank
from unipar.results.result_files import (
    CONFIG_FILE,
    find_result_file,
    parse_comparison,
    read_mapping,
)
from unipar.results.row import StrategyResult
from unipar.results.run_report import Report
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.mappings import nested_mapping
from unipar.utils.text import first_few

_DTYPES: Final = {
    "fp32": "float32",
    "fp64": "float64",
    "bf16-mixed": "float32",
    "fp8": "float32",
    "fp8-rowwise": "float32",
    "bf16-master": "bfloat16",
    "fp16": "float32",
}
"""Dtype of trained parameters by `train.precision`."""


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """Summary of a training, as far as its files say; what is not known is empty."""

    folder: Path
    kind: Literal["observation", "run", "strategy"]
    facts: Mapping[str, str]
    """Training as text by name: ranks, steps, model, optimizer, clip."""

    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers among the optimizer's settings."""

    seconds: float | None = None
    """Median time of a step, on the slowest rank that is known."""

    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Median time of each part of a step, on the same rank."""

    waiting: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict[int, float])
    """Loss by step: of the global batch, or the mean of the ranks' losses."""

    norms: Mapping[int, float] = field(default_factory=dict[int, float])
    """Gradient norm by step, before the clip."""

    norms_after: Mapping[int, float] = field(default_factory=dict[int, float])
    """Norm of the gradients that the optimizer was given, by step."""

    rates: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """Learning rates of the optimizer's groups by step."""

    account: MemoryAccount | None = None
    """Memory account of the fullest rank; None: only the phases are known, or nothing."""

    phases: tuple[PhasePeak, ...] = ()
    """Memory at the peak of each phase, on the fullest rank."""

    findings: tuple[TrainingFinding, ...] | None = None
    """None: nothing was compared between its ranks."""

    @property
    def sent(self) -> dict[str, int] | None:
        """Bytes sent in a step by collective and group; None if that was not recorded."""
        if self.account is None or not (self.account.sent_by or self.account.sent):
            return None
        return {f"{kind} ({group})": size for group, kind, size in sent_rows(self.account)}

    @property
    def label(self) -> str:
        """Name for a sentence, with the number of ranks."""
        ranks = self.facts.get("ranks", "?")
        return f"{self.facts.get('strategy', self.kind)}, {ranks} {'rank' if ranks == '1' else 'ranks'}"


def read_training(place: Path) -> TrainingSummary:
    """Return what a folder's training did; raise ReportError if it holds none, or several."""
    compared = place.parent / "compare.json"
    if place.is_dir() and compared.is_file() and not (place / "observed.json").is_file():
        return _of_strategy(place, compared)
    kind, file = find_result_file(place)
    if kind == "observation":
        return _of_observation(Observation.read(file.parent))
    if place.is_dir() and run_log_path(place, 0).is_file():
        return _of_run(place)
    if kind == "run":
        return _of_run(file.parent)
    if kind == "comparison":
        names = [
            str(file.parent / slug)
            for row in parse_comparison(file, read_mapping(file, "comparison")).rows
            if (slug := _slug_of(row)) is not None
        ]
        raise ReportError(
            f"{place} holds a comparison of several strategies, and an observed command is compared with one: give its "
            f"folder, such as {first_few(names)}"
        )
    raise ReportError(
        f"{place} holds a {kind}: an observed command is compared with another one, with a run, or with a strategy of "
        "a comparison"
    )


def _slug_of(row: StrategyResult) -> str | None:
    try:
        return Strategy.parse(row.strategy).slug
    except ConfigError:
        return None


def _of_observation(seen: Observation) -> TrainingSummary:
    first = seen.ranks[0]
    slowest = max(seen.ranks, key=lambda rank: rank.seconds or 0.0)
    account = seen.fullest_account
    return TrainingSummary(
        folder=seen.folder,
        kind="observation",
        facts=_observed_facts(seen, first),
        settings=first.settings,
        seconds=slowest.seconds,
        parts=slowest.phases,
        waiting=slowest.waiting,
        losses=_mean_losses(seen),
        norms=_finite(first.norms),
        norms_after=_finite(first.norms_after),
        rates={step: rates for step, rates in first.rates.items() if rates},
        account=account,
        phases=() if account is None else account.phases,
        findings=seen.command.findings,
    )


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if math.isfinite(value)}


def _observed_facts(seen: Observation, first: ObservedRank) -> dict[str, str]:
    known = {
        "strategy": seen.report.strategy or "observed",
        "ranks": str(first.size),
        "device": first.device,
        "steps": describe_steps(first),
        "model": "; ".join(first.models),
        "parameters": f"{first.parameters:,}",
        "dtypes": ", ".join(sorted(first.dtypes)),
        "optimizer": ", ".join(dict.fromkeys(first.optimizers)),
        "called by": " in ".join(reversed(first.libraries)) or "the script",
        "backwards a step": str(max(first.backwards, default=0) or ""),
        "batch": "" if first.first_dimension is None else f"{first.first_dimension} in its first dimension",
        "clip": "none" if first.clip is None else f"{first.clip:g}",
        "exit code": str(seen.command.exit_code),
    }
    return {name: text for name, text in known.items() if text}


def _mean_losses(seen: Observation) -> dict[int, float]:
    """Return the mean of the ranks' losses at each step that all ranks with losses have logged."""
    by_rank = [_losses_of(RunLog.read(run_log_path(seen.folder, rank.rank))) for rank in seen.ranks]
    known = [losses for losses in by_rank if losses]
    steps = sorted(set.intersection(*map(set[int], known))) if known else []
    return {step: fmean(losses[step] for losses in known) for step in steps}


def _losses_of(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    return {int(row["step"]): float(row["loss"]) for row in _steps(rows) if row.get("loss") is not None}


def _steps(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("event") == "step"]


def _of_run(folder: Path) -> TrainingSummary:
    try:
        report = Report.read(folder)
        rows = _steps(RunLog.read(run_log_path(folder, 0)))
        times = [float(row["seconds"]) for row in rows if row.get("seconds")]
        waits = [float(row["waiting"]) for row in rows if row.get("waiting") is not None]
    except (OSError, LookupError, TypeError, ValueError) as e:
        raise ReportError(f"the run logs in {folder} cannot be read ({type(e).__name__}: {e})") from None
    accounts = _readable_accounts(folder)
    account = largest_account(accounts) if accounts else None
    phases = account.phases if account is not None else tuple(report.memory[-1][1]) if report.memory else ()
    facts, settings = _config_facts(folder)
    return TrainingSummary(
        folder=folder,
        kind="run",
        facts={
            "strategy": report.strategy,
            "ranks": str(report.size),
            "steps": describe_steps(ObservedRank(rank=0, size=1, steps=report.steps)),
            **({"parameters": f"{report.parameters:,}"} if report.parameters else {}),
            **facts,
        },
        settings=settings,
        seconds=median(times[1:] or times) if times else None,
        waiting=median(waits) if waits else None,
        losses=dict(report.losses),
        norms=dict(report.norms),
        rates=_numbers_only(report.rates),
        account=account,
        phases=phases,
    )


def _readable_accounts(folder: Path) -> list[MemoryAccount]:
    return [account for account in read_accounts(folder, []) if account.phases]


def _numbers_only(rates: Sequence[tuple[int, Any]]) -> dict[int, tuple[float, ...]]:
    """Return the rates of the optimizer's groups; of a model of several parts none."""
    return {
        step: tuple(map(float, rate)) if isinstance(rate, list) else (float(rate),)
        for step, rate in rates
        if isinstance(rate, int | float | list)
    }


def _of_strategy(folder: Path, compared: Path) -> TrainingSummary:
    comparison = parse_comparison(compared, read_mapping(compared, "comparison"))
    row = next((row for row in comparison.rows if _slug_of(row) == folder.name), None)
    if row is None or row.outcome != "ran":
        why = "is not in it" if row is None else f"did not run ({row.note or row.outcome})"
        raise ReportError(f"{folder} is not a strategy of {compared} that can be compared: it {why}; give one that ran")
    account = largest_account(row.memory) if row.memory else None
    facts, settings = _config_facts(folder)
    return TrainingSummary(
        folder=folder,
        kind="strategy",
        facts={
            "strategy": row.strategy,
            "ranks": str(comparison.rank_count(row)),
            "steps": describe_steps(ObservedRank(rank=0, size=1, steps=len(row.losses))),
            **facts,
        },
        settings=settings,
        seconds=median(row.timed_seconds) if row.timed_seconds else None,
        losses=dict(enumerate(row.losses, 1)),
        account=account,
        phases=() if account is None else account.phases,
    )


def _config_facts(folder: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Return optimizer, dtype and clip that a config gives, and the optimizer's numbers; {} without a config."""
    try:
        train = nested_mapping(json.loads((folder / CONFIG_FILE).read_text("utf-8")), "train")
    except (OSError, ValueError, AttributeError):
        return {}, {}
    optimizer = nested_mapping(train, "optimizer")
    facts: dict[str, str] = {}
    if isinstance(name := optimizer.get("name"), str):
        facts["optimizer"] = name
    if isinstance(precision := train.get("precision"), str) and precision in _DTYPES:
        facts["dtypes"] = _DTYPES[precision]
    if "clip" in train:
        clip = train["clip"]
        most = clip.get("max") if isinstance(clip, dict) else clip
        facts["clip"] = "none" if most is None else f"{most:g}"
    return facts, numbers_among(optimizer)


def numbers_among(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings that are numbers; pairs such as betas count one by one."""
    found: dict[str, float] = {}
    for key, value in settings.items():
        values = {f"{key}[{i}]": v for i, v in enumerate(value)} if isinstance(value, list | tuple) else {key: value}
        found |= {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return found
