"""Checks before a run: everything that can be checked before a process starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from unipar.backend import checks, registry, resources
from unipar.backend.checks import CheckedSource, given_source
from unipar.config import Config
from unipar.config.config_source import ConfigSource, Given
from unipar.config.settled import SettledConfig
from unipar.distributed.launchers import Launcher, find_launcher
from unipar.distributed.meeting.alive_group import find_place
from unipar.distributed.place import Place
from unipar.errors import TaskError, Unsupported, WorldMismatch
from unipar.launcher.micro_batch.choice import (
    list_candidates,
    with_micro,
)
from unipar.launcher.preparation.earlier_config import keep_earlier_changes
from unipar.model import weight_file
from unipar.task import Task
from unipar.task.importing import LaunchReached, is_importing_task
from unipar.task.reference import TaskRef
from unipar.task.task import FunctionTask

_NEITHER_SAVES_NOR_STOPS: Final = {
    "checkpoint": None,
    "resume": None,
    "launch.deadline": None,
    "launch.restarts": 0,
    "eval.stop": None,
}
"""Keys of runs that are compared with others."""


@dataclass(frozen=True)
class Prepared:
    """A checked config with its task, place and device: the input of every command that starts processes."""

    source: CheckedSource
    ref: TaskRef | None
    """Reference to the task's code; None if no task is named, or if the code is in the user's own script."""

    place: Place | None
    """Place of this process in the world that a foreign launcher made; None: unipar starts the ranks."""

    device: str
    """`cpu`, `cuda` or `cuda:N`."""

    why: str
    """Reason for that device; empty if the config says it."""

    @property
    def computed(self) -> Config:
        """Config with its device known, so that GPUs are not counted again."""
        return self.source.config.on_device(self.device)

    def ranks(self) -> resources.RankCount:
        """Return how many ranks the config asks for on this machine, and why."""
        source = self.source
        return resources.ranks_in(source.strategy, source.config, self.place, alone=source.alone)

    def show_notes(self, *, quiet: bool) -> None:
        """Print what was changed to fit to an override; once, by rank 0, if a launcher started several processes."""
        if not quiet and (self.place is None or self.place.rank == 0):
            sys.stderr.writelines(f"{note}\n" for note in self.source.notes)

    def with_micro(self, micro: int) -> Self:
        """Return the same with a microbatch of this size."""
        return replace(self, source=replace(self.source, config=with_micro(self.source.config, micro)))

    def candidates(self, ranks: int) -> list[int]:
        """Return the sizes among which `batch.micro: auto` chooses for this many ranks, ascending."""
        strategy = self.source.strategy
        self.source.config.parallel.settle(ranks)
        return list_candidates(self.computed, self.source.backend, strategy, ranks // strategy.axes.ranks)

    def settled(self, ranks: int, local: int | None = None, asking_key: str = "parallel.data") -> SettledConfig:
        """Return the config settled for this many ranks, `local` of them here; errors name the key `asking_key`."""
        launched = self.place is not None
        return checks.settle_source(self.source, ranks, self.device, local, asking_key, launched=launched)


def prepare(
    config: Given,
    task: type[Task] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    code: Literal["needed", "if named", "in the script"] = "needed",
    starts: str = "",
) -> Prepared:
    """Read a config and check everything that it names; start nothing, import no library and no user code.

    `code`: whether a task must be named. `starts`: what the caller starts itself, if it cannot be a rank of a
    world that another launcher made on this machine (first part of the error).
    """
    if is_importing_task():
        raise LaunchReached
    if isinstance(task, Task):
        name = type(task).__name__
        raise TaskError(
            f"task= is an instance of {name}, and each rank creates its own: pass the class, task={name}, and its "
            'arguments as task.args (in the config, or overrides={"task.args": {...}})'
        )
    source = given_source(config, overrides)
    if not starts and not isinstance(config, ConfigSource):  # what the command line has read has it already
        source = keep_earlier_changes(source)
    if starts:  # what compares runs neither saves nor resumes them
        source = replace(source, config=source.config.changed(_NEITHER_SAVES_NOR_STOPS))
    place = _foreign_place(source, starts)
    ref = None
    use = source.config.task.use if source.config.task is not None else None
    if code == "needed" or (code == "if named" and use is not None):
        ref = TaskRef.of(task, source.config.task, functions or {})
        ref.check_code()
    if (wanted := source.config.model.loading) is not None:
        weight_file.validate_weight_file(wanted, (source.folder, Path.cwd()))
    prepared = Prepared(source, ref, place, *resources.choose_device(source.config))
    if starts:
        prepared.show_notes(quiet=False)
    return prepared


def _foreign_place(source: CheckedSource, starts: str) -> Place | None:
    """Return this process's place under a foreign launcher, or None; raise if that launcher cannot start this run."""
    launchers = registry.list_launchers()
    place = find_place(launchers, folder=source.out.resolve())
    if place is None:
        return resources.refuse_other_machines(source.config)
    if starts and not place.several_machines:
        raise WorldMismatch(
            f"{starts}, and this process is rank {place.rank} of a world that {place.launcher} started: "
            "run it without that launcher"
        )
    if starts and source.config.batch.is_auto:
        raise WorldMismatch(
            "batch.micro: auto is found by trials on one machine, and this command is started on several: run it on "
            "one first, and write the size that it tells into batch.micro"
        )
    if (launcher := find_launcher(launchers)) is not None:
        check_launcher_serves(launcher, source)
    return place


def check_launcher_serves(launcher: Launcher, source: CheckedSource) -> None:
    """Raise Unsupported if the launcher serves other backends only."""
    if launcher.serves is None or source.config.backend in launcher.serves:
        return
    raise Unsupported(
        str(source.strategy),
        [
            f"{launcher.name} starts {', '.join(launcher.serves)} only; start the same script with "
            "`torchrun --nproc-per-node N`, or with `python`, and unipar starts its ranks itself"
        ],
    )


def make_task(
    task: type[Task] | None, functions: Mapping[str, Callable[..., Any]], config: Config, ref: TaskRef | None
) -> Task:
    """Return the task as an object, from its functions, its class or its reference."""
    if functions:
        return FunctionTask(functions)
    if task is not None:
        return task(**(config.task.args if config.task else {}))
    assert ref is not None
    return ref.load()
