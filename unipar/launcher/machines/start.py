"""Start of a run on several machines: an error of one rank is raised on all, and all must run the same."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unipar.backend import registry
from unipar.backend.installed import library_versions
from unipar.config import Config
from unipar.distributed.meeting.alive_group import find_place
from unipar.distributed.place import Place
from unipar.errors import WorkerFailed, WorldMismatch, rebuild
from unipar.launcher.processes import early
from unipar.utils.text import count_of

if TYPE_CHECKING:
    from unipar.distributed.meeting.world_session import Session
    from unipar.distributed.world_machines import WorldMachines
    from unipar.launcher.preparation.prepared_run import PreparedRun
    from unipar.task.reference import TaskRef

SECONDS_TO_TELL: Final = 30.0
"""Seconds that a rank whose config is wrong waits for others, to tell them."""

_NOT_COMPARED = ("out", "machines", "task", "resume")
"""Sections of the config that may differ between machines; the task's code is compared by itself."""


class CommonStart:
    """Start of the ranks of a world: on several machines they wait for one another, and fail together."""

    def __init__(self) -> None:
        self._place = self._find_place()
        self._config: Config | None = None
        self._session: Session | None = None

    @staticmethod
    def _find_place() -> Place | None:
        """Return this rank's place if its world is on several machines, else None."""
        try:
            place = find_place(registry.list_launchers())
        except WorldMismatch:  # what prepares the run says so
            return None
        return place if place is not None and place.several_machines else None

    @contextmanager
    def sharing_errors(self) -> Generator[None]:
        """Context manager: an error of the body on one rank is told to all others, which raise it too."""
        try:
            yield
        except Exception as e:
            if self._place is not None:
                self._tell(e)
            raise

    def meet(self, config: Config) -> int:
        """Find the other ranks; return how often their launcher has started them again."""
        self._config = config
        if self._place is None:
            return 0
        session = self._meet()
        _check_numbers(config, session)
        return session.restarts

    def _meet(self) -> Session:
        if self._session is None:
            early.end_imports()
            from unipar.backend.joining import join_session

            assert self._place is not None
            assert self._config is not None
            self._session = join_session(self._config, self._place)
        return self._session

    def _tell(self, error: Exception) -> None:
        """Tell an error to the other ranks; raise theirs if it differs."""
        if self._session is None and isinstance(error, WorldMismatch) and self._config is not None:
            return  # it is that they have not met
        early.end_imports()
        from unipar.distributed.meeting.world_session import session_of

        assert self._place is not None
        if self._session is None:
            meet = min(SECONDS_TO_TELL, self._config.launch.rendezvous_timeout) if self._config else SECONDS_TO_TELL
            try:
                self._session = session_of(self._place, meet, meet)
            except WorldMismatch:
                return
        self._decide({"kind": type(error).__name__, "error": str(error)})

    def agree(self, plan: PreparedRun) -> PreparedRun:
        """Return the run as rank 0 has prepared it, once all ranks have; raise the same error on all otherwise."""
        if self._place is None:
            return plan
        theirs = self._decide(_description(plan))
        settled = plan.settled.changed({"resume": theirs["resume"]})
        return replace(plan, settled=settled, finished=theirs["finished"], goes_on=theirs["goes_on"])

    def _decide(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        session = self._meet()
        return json.loads(
            session.decide(
                f"start/{session.next_launch()}",
                json.dumps(mine),
                lambda texts: json.dumps(_judge([json.loads(text) for text in texts], session.machines)),
                self._config.launch.rendezvous_timeout if self._config is not None else SECONDS_TO_TELL,
            )
        )


def _check_numbers(config: Config, session: Session) -> None:
    """Raise WorldMismatch if the launcher has started ranks on other machines than the config says."""
    wanted, machines = config.machines, session.machines
    if wanted is None or wanted.nodes == 1:
        return
    most = max(len(machine.ranks) for machine in machines.all)
    if len(machines.all) != wanted.nodes:
        text = f"machines.nodes: {wanted.nodes}, and {session.place.launcher} has started ranks on "
        raise WorldMismatch(
            f"{text}{machines.describe_number()} ({machines}): start it on {wanted.nodes}, or change machines.nodes"
        )
    if isinstance(wanted.ranks_per_node, int) and most != wanted.ranks_per_node:
        raise WorldMismatch(
            f"machines.ranks_per_node: {wanted.ranks_per_node}, and {session.place.launcher} has started "
            f"{count_of(most, 'rank')} on a machine ({machines}): start {wanted.ranks_per_node} on each, "
            "or change machines.ranks_per_node"
        )


def _description(plan: PreparedRun) -> dict[str, Any]:
    """Return what must be the same on all ranks, and what is decided by rank 0."""
    versions = library_versions(plan.backend.requires)
    versions["python"] = versions["python"].rpartition(".")[0]
    decided = {"resume": plan.config.resume, "finished": plan.finished, "goes_on": plan.goes_on}
    sections = section_digests(plan.config.model_dump(mode="json"))
    return {"versions": versions, "sections": sections, "code": code_digests(plan.ref), "decided": decided}


def section_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each section of a config, as plain values, that must be the same on all machines."""
    return {name: _digest(json.dumps(value)) for name, value in config.items() if name not in _NOT_COMPARED}


def code_digests(ref: TaskRef | None) -> dict[str, str]:
    """Return a digest of each file of a task's code, by its name."""
    if ref is None:
        return {}
    files: dict[str, str] = {}
    for location in filter(None, [ref.task, *ref.functions.values()]):
        file = location.file
        if file is None and location.module is not None:
            spec = importlib.util.find_spec(location.module)
            file = spec.origin if spec is not None else None
        if file is not None and Path(file).is_file():
            files[Path(file).name] = _digest(Path(file).read_bytes())
    if ref.carried:
        files["the code in the prompt"] = _digest(ref.carried)
    return files


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:12]


def _judge(answers: list[dict[str, Any]], machines: WorldMachines) -> dict[str, Any]:
    """Return what rank 0 has decided; raise an error if a rank has one, or runs something else than rank 0."""
    failed = [rank for rank, one in enumerate(answers) if "error" in one]
    if failed:
        first = answers[failed[0]]
        same = len(failed) == len(answers) and all(one["error"] == first["error"] for one in answers)
        where = "" if same else f"rank {failed[0]} on {machines.of(failed[0])}: "
        text = where + first["error"]
        raise rebuild(first["kind"], text) or WorkerFailed(f"{first['kind']}: {text}")
    for rank, one in enumerate(answers):
        if sentence := _difference(answers[0], one):
            raise WorldMismatch(
                f"{machines.of(rank)} (rank {rank}) and {machines.of(0)} (rank 0) do not run the same: {sentence}"
            )
    return answers[0]["decided"]


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return in what two ranks differ and how to mend it, or ""."""
    for name in first["versions"] | other["versions"]:
        one, two = other["versions"].get(name, "is missing"), first["versions"].get(name, "is missing")
        if one != two:
            return f"{name} {one} there and {two} here; install one version on all machines"
    for what, name in (("code", "the file {} differs"), ("sections", "the config's section {} differs")):
        for key in first[what] | other[what]:
            if first[what].get(key) != other[what].get(key):
                return f"{name.format(key)}; copy the same files to all machines"
    return ""
