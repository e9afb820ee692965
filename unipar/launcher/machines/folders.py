"""Run folder of a world on several machines: rank 0's where a machine sees it, else one of its own."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unipar.errors import UniparError, WorldMismatch, rebuild
from unipar.run_folder import folder
from unipar.run_folder.layout import attempts_path

if TYPE_CHECKING:
    from unipar.distributed.meeting.tree import RankTree
    from unipar.distributed.meeting.world_session import Session
    from unipar.launcher.preparation.prepared_run import PreparedRun

MARK_PREFIX: Final = ".seen-"
"""Begin of the name of a file that tells whether two machines see the same folder."""

_SECONDS_TO_LOOK: Final = 2.0
"""Seconds in which rank 0's mark must be seen, where it is not known whether the folder is shared."""

_SECONDS_IF_SHARED: Final = 60.0
"""The same where the config says that it is shared: NFS keeps lists of names for some time."""


@contextmanager
def run_folder_on_all_machines(plan: PreparedRun, session: Session) -> Generator[PreparedRun]:
    """Context manager: the run in rank 0's folder, or in this machine's own, with its `remote_ranks`.

    Which machines see rank 0's folder is found by looking for a file in it with a random name.
    """
    name, rank, tree = f"folder/{session.next_launch()}", session.place.rank, session.tree
    patience = plan.config.launch.rendezvous_timeout
    assert tree is not None
    with ExitStack() as stack:
        placed, mine = plan, dict[str, Any]()
        try:
            if rank == 0:
                placed = _create(plan, tree, name, stack)
            else:
                facts = json.loads(tree.tell(f"{name}/first", None, patience))
                if "out" in facts:  # else rank 0 has failed
                    placed, mine["apart"] = _find_or_mirror(plan, session, name, facts, stack)
        except UniparError as e:
            where = f"{session.machines.of(rank)}: " if rank else ""
            mine |= {"error": f"{where}{e}", "kind": type(e).__name__}
        answer = session.decide(name, json.dumps(mine), _judge_folders, patience)
        if rank == 0:
            for mark in placed.out.glob(f"{MARK_PREFIX}*"):
                mark.unlink(missing_ok=True)
        yield replace(placed, remote_ranks=tuple(json.loads(answer)))


def _judge_folders(texts: list[str]) -> str:
    """Return the ranks that have a folder of their own machine, as JSON; raise the error of a rank that has none."""
    ranks = [json.loads(text) for text in texts]
    for one in ranks:
        if "error" in one:
            raise rebuild(one["kind"], one["error"]) or WorldMismatch(one["error"])
    return json.dumps([rank for rank, one in enumerate(ranks) if one.get("apart")])


def _create(plan: PreparedRun, tree: RankTree, name: str, stack: ExitStack) -> PreparedRun:
    """Create rank 0's run folder and tell the others where it is, and what its files say."""
    sent: dict[str, str] = {}
    try:
        placed = stack.enter_context(plan.create_folder())
        out, attempts = placed.out.resolve(), attempts_path(placed.out)
        token = secrets.token_hex(8)
        with folder.explain_write_errors(out):
            (out / f"{MARK_PREFIX}{token}").touch()
        sent = {"out": str(out), "token": token, **{name: (out / name).read_text("utf-8") for name in folder.RUN_FILES}}
        sent["attempts"] = attempts.read_text("utf-8") if attempts.exists() else ""
        return placed
    finally:
        tree.tell(f"{name}/first", json.dumps(sent))


def _find_or_mirror(
    plan: PreparedRun, session: Session, name: str, marks: Mapping[str, str], stack: ExitStack
) -> tuple[PreparedRun, bool]:
    """Return the run in the folder of this rank, and whether that is one of this machine's own."""
    theirs = Path(marks["out"])
    settings = plan.config.machines
    wanted = settings.folder if settings is not None else "auto"
    if wanted != "own" and is_mark_seen(theirs / f"{MARK_PREFIX}{marks['token']}", wanted):
        return plan.in_folder(theirs), False
    if wanted == "shared":
        raise WorldMismatch(
            f"machines.folder: shared, and {theirs} is not the folder that rank 0 has made on "
            f"{session.machines.of(0)}: name a folder on a file system that all machines mount (out: ..., or --out "
            "DIR), or say machines.folder: own, so that each machine writes to its own disk"
        )
    rank, tree, key = session.place.rank, session.tree, f"{name}/machine"
    assert tree is not None
    if not session.machines.leads(rank):
        made = json.loads(tree.tell_machine(key, None, plan.config.launch.rendezvous_timeout))
        return plan.in_folder(Path(made["out"]) if "out" in made else theirs), True
    made: dict[str, str] = {}
    try:
        placed = stack.enter_context(_mirror(plan, theirs.name, marks))
        made["out"] = str(placed.out.resolve())
        return placed, True
    finally:
        tree.tell_machine(key, json.dumps(made))


def is_mark_seen(mark: Path, wanted: str) -> bool:
    """Return whether a file is there; its folder is listed, as a network file system may show a new file late."""
    until = time.monotonic() + (_SECONDS_IF_SHARED if wanted == "shared" else _SECONDS_TO_LOOK)
    while True:
        try:
            if mark.name in os.listdir(mark.parent):
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


@contextmanager
def _mirror(plan: PreparedRun, name: str, marks: Mapping[str, str]) -> Generator[PreparedRun]:
    """Context manager: a folder of this machine's own, of the same name and with the same files as rank 0's."""
    out = plan.out if plan.numbered is None else plan.numbered.with_name(name)
    config, launch = (marks[name] for name in folder.RUN_FILES)
    config = json.dumps(json.loads(config) | {"out": str(out)}, indent=2)
    if plan.goes_on and (out / next(iter(folder.RUN_FILES))).is_file():
        with folder.continue_run_folder(out, config, launch):
            attempts_path(out).write_text(marks["attempts"], encoding="utf-8")
            yield plan.in_folder(out)
        return
    if plan.numbered is not None:
        with folder.claim_run_folder(plan.numbered) as out:
            config = json.dumps(json.loads(config) | {"out": str(out)}, indent=2)
            folder.write_run_files(out, config, launch)
            yield plan.in_folder(out)
        return
    with folder.create_run_folder(out, config, launch, overwrite=plan.overwrite or plan.goes_on):
        if marks["attempts"]:
            attempts_path(out).write_text(marks["attempts"], encoding="utf-8")
        yield plan.in_folder(out)
