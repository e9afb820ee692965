"""`unipar verify`: check that every strategy gives the numbers of one process on a task, and find where it differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.backend import checks, registry
from unipar.backend.installed import installed_versions, machine_summary
from unipar.backend.offered_strategies import ONE, is_single_process, read_strategy
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.config import Strategy
from unipar.config.config import Eval
from unipar.config.config_source import Given
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError
from unipar.launcher.micro_batch.choice import PREFIX, ChosenMicro
from unipar.launcher.preparation.prepare import Prepared, prepare
from unipar.launcher.processes.signals import sigterm_as_interrupt
from unipar.launcher.remote.across import StarterOnMachines, starter_on_machines
from unipar.launcher.strategy_selection import SelectedStrategies, library_names, select_strategies, settle_one_micro
from unipar.report.build import try_write_page, write_page
from unipar.results.live_table import LiveTable
from unipar.results.result_files import ORIGINAL_CONFIG_FOLDER, VERIFY_JSON, original_config_path
from unipar.results.row import StrategyResult
from unipar.results.verdicts import Verdict, Verdicts
from unipar.run_folder import folder
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.utils.address import Location, parse_location
from unipar.utils.procfs import cores_per_rank

DEFAULT_STEPS = 10
"""Number of steps that are compared unless `steps` is given."""

VERIFY_FILE_NAMES = (VERIFY_JSON, PAGE_FILE_NAME, ORIGINAL_CONFIG_FOLDER, "verify.svg", "verify.html")
"""Names of the files that verify writes; the last two are of earlier versions."""


def verify(
    config: Given,
    *,
    task: type[Task] | None = None,
    strategies: Sequence[str] = (),
    world: int | None = None,
    steps: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    strict: bool = False,
    resume: bool | str | Location = False,
) -> Verdicts:
    """Train some steps of `config` in one process and in every strategy, and compare the numbers.

    Progress goes to stderr.

    Args:
        config: Path of a config, a mapping, or a `Config`.
        task: The `Task` class, if the config has no `task.use`.
        strategies: Strategies in place of `compare.strategies`.
        world: Number of ranks in place of `parallel.data`, which is 2 if it is not set.
        steps: Number of optimizer steps; None: 10.
        overrides: Values by dotted key that replace those of the config.
        overwrite: Replace the contents of the run folder.
        strict: Whether `code` is 1 if the training depends on how a batch is cut.
        resume: True: one strategy trains the first half and saves, and every strategy continues from there; or the path
            of a checkpoint to continue from.

    Returns:
        A verdict for each strategy: whether it agrees, or the step, module and kind of fault.

    Raises:
        ConfigError: The config is invalid, or a strategy does not exist.
        TaskError: The task is missing or incomplete.
        OutExists: The run folder is in use.

    Examples:
        >>> verdicts = unipar.verify("train.yaml", strategies=["native/nothing"], steps=4, overwrite=True)
        >>> verdicts.code
        0
    """
    prepared = prepare(config, task, overrides, starts="verify starts a world for each library")
    number = _count_ranks(prepared, world)
    prepared, micro = settle_one_micro(
        prepared, ("single", *(strategies or prepared.source.config.compare.strategies)), [number]
    )
    with starter_on_machines(prepared.source.config, prepared.place) as machines:
        local = machines.spread(number) if machines is not None else None
        settled = prepared.settled(number, local).changed({"eval": Eval(), "log.to": (), "log.trace": None})
        asked = _VerifyRequest(prepared, settled, tuple(strategies), steps, resume, machines)
        return _verify(asked, micro, strict=strict, overwrite=overwrite)


@dataclass(frozen=True)
class _VerifyRequest:
    """Verification that is to be made, after the checks that need no process."""

    prepared: Prepared
    settled: SettledConfig
    strategies: tuple[str, ...]
    steps: int | None
    resume: bool | str | Location
    machines: StarterOnMachines | None


def _verify(request: _VerifyRequest, micro: ChosenMicro | None, *, strict: bool, overwrite: bool) -> Verdicts:
    prepared, settled, strategies, steps, resume = (
        request.prepared,
        request.settled,
        request.strategies,
        request.steps,
        request.resume,
    )
    assert prepared.ref is not None
    source = prepared.source
    train = settled.config.train
    patterns = tuple(strategies) or settled.config.compare.strategies
    selected = select_multi_rank_strategies(settled, patterns)
    checkpoint = None if isinstance(resume, bool) else inspect_checkpoint(parse_location(str(resume)))
    begin = checkpoint.manifest.step if checkpoint is not None else 0
    wanted = steps or begin + DEFAULT_STEPS
    wanted = min(wanted, train.steps or wanted)
    if checkpoint is not None and begin >= wanted:
        raise ConfigError(
            f"--from: {checkpoint.path} is of step {begin}, and {wanted} steps are compared; give it more"
        )
    if resume and wanted < 2:
        raise ConfigError(f"verify --resume saves after half of the steps, and there is {wanted}; give it at least two")
    out = source.out / "verify"
    first = Verdicts(
        name=source.name,
        out=str(out),
        precision=train.precision,
        ranks=settled.ranks,
        machines=request.machines.machines_of(settled.ranks) if request.machines is not None else 1,
        steps=wanted,
        strict=strict,
        versions=installed_versions(Strategy.parse(strategy).backend for strategy in selected),
        machine=machine_summary(),
        remarks=[] if micro is None else [f"{PREFIX}: {micro.micro}, {micro.says}"],
        rows=[_initial_row(row, patterns) for row, _ in selected.values()],
        library_names=library_names(selected),
    )
    configs = {name: at for name, (row, at) in selected.items() if row.outcome == "waits" and at is not None}
    with folder.lock_folder(out):
        folder.clear_own_files(out, "verify", VERIFY_FILE_NAMES, "verification", overwrite=overwrite)
        with folder.explain_write_errors(out):
            file = original_config_path(out, source.name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(settled.config.json_for_ranks(), encoding="utf-8")
        halfway = begin or (wanted // 2 if resume else None)
        path = checkpoint.path if checkpoint is not None else None
        path = path.absolute() if isinstance(path, Path) else path
        now = _run_session(request, prepared.ref, configs, first, halfway, path) if configs else first
        (out / VERIFY_JSON).write_text(
            json.dumps(now.model_dump(mode="json"), indent=2, allow_nan=True) + "\n", encoding="utf-8"
        )
        return now.changed(note=try_write_page(lambda: write_page(out)))


def select_multi_rank_strategies(settled: SettledConfig, patterns: Iterable[str]) -> SelectedStrategies:
    """Return the strategies that compare would select, without the reference; those of one process are refused."""
    selected = select_strategies(settled, patterns)
    del selected[str(ONE)]
    for name, (row, at) in selected.items():
        if row.outcome == "waits" and is_single_process(Strategy.parse(name)):
            note = "it is one process, and verify compares several ranks with one process; `unipar compare` runs it"
            selected[name] = row.changed(outcome="refused", note=note), at
    return selected


def _initial_row(row: StrategyResult, patterns: Sequence[str]) -> Verdict:
    """Return the verdict on a strategy before anything runs; it was named, or a pattern such as `*` gave it."""
    outcome: Any = row.outcome if row.outcome in ("waits", "refused", "absent") else "failed"
    named = row.strategy in {name for p in patterns if not p.endswith("*") for name in (p, str(read_strategy(p)))}
    alone = not named and is_single_process(Strategy.parse(row.strategy))
    return Verdict(strategy=row.strategy, outcome=outcome, note=row.note, named=named, alone=alone)


def _count_ranks(prepared: Prepared, world: int | None) -> int:
    """Return the number of ranks of every strategy."""
    configured = prepared.source.config.parallel.ranks
    number = world or (configured if isinstance(configured, int) else max(2, prepared.ranks().number))
    if number < 2:
        raise ConfigError(
            f"verify compares several ranks with one process, and this is a world of {number}; "
            "give it at least two (--world 2, or verify(..., world=2))"
        )
    return number


def _run_session(
    request: _VerifyRequest,
    ref: TaskRef,
    configs: Mapping[str, SettledConfig],
    first: Verdicts,
    halfway: int | None,
    checkpoint: Location | None,
) -> Verdicts:
    from unipar.verification.numbers import numbers_on
    from unipar.verification.runs import RunPlan
    from unipar.verification.verification_steps import VerificationSession
    from unipar.verification.world_pool import open_world_pool

    settled, machines = request.settled, request.machines
    runs = RunPlan(settled, first.steps, configs, halfway, checkpoint, numbers_on(settled.device))
    one = runs.one_process_config()
    checks.check_strategy(one.config, registry.find_backend(one.strategy.backend), one.strategy)
    # the same in one process, because sums depend on the number of threads
    threads = cores_per_rank(first.ranks if machines is None else machines.per or first.ranks)
    backends = {one.strategy.backend, *(at.strategy.backend for at in configs.values())}
    with sigterm_as_interrupt(), LiveTable() as board:
        board.show(first, "starts")
        with open_world_pool(Path(first.out), ref, backends, threads, settled.device, machines) as pool:
            return VerificationSession(runs, pool, first, board.show).run()
