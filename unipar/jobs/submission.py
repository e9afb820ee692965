"""`submit`: check a config, write what a job system reads, and hand it over."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from math import lcm
from pathlib import Path
from typing import Any

from unipar.backend import checks
from unipar.backend.checks import CheckedSource
from unipar.backend.offered_strategies import check_offers
from unipar.config import Config, Strategy
from unipar.config.job_system import JobSystem, NewJob, SubmittedJob, find_job_system, job_system_names
from unipar.config.sections.machines import Machines
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, OutExists, Stopped, Unsupported
from unipar.jobs.client import ClientFailed, ask_client
from unipar.jobs.submitted import EXIT_CODE_FILE, OUTPUT_FILE, write_submitted
from unipar.run_folder import folder as run_folder
from unipar.run_folder.folder import SUBMISSIONS, explain_write_errors, numbered_folders
from unipar.task.reference import TaskRef
from unipar.utils.text import count_of

_DETACHED = f'"$@" & echo $! > "$0/.pid" && mv "$0/.pid" "$0/pid"; wait $!; echo $? > "$0/{EXIT_CODE_FILE}"'
"""Shell text that runs a client and keeps its exit code when nobody waits for it; $0 is the job's folder."""


@dataclass(frozen=True)
class Submission:
    """A job that can be handed over, and what is written for it."""

    job: NewJob
    system: JobSystem[Any]
    texts: dict[str, str]

    @property
    def command(self) -> list[str]:
        """Command that hands the job over."""
        return self.system.hand_over(self.job)

    def hand_over(self, *, detach: bool = False) -> tuple[SubmittedJob, int]:
        """Write the files and hand the job over; return it, and the exit code of a client that runs to the job's end.

        `detach`: do not wait for such a client.
        """
        job, system = self.job, self.system
        if why := system.why_missing():
            raise ClientFailed(f"machines.on: {system.name}: {why}")
        with explain_write_errors(job.out):
            job.folder.mkdir(parents=True)
            for name, text in self.texts.items():
                (job.folder / name).parent.mkdir(exist_ok=True)
                (job.folder / name).write_text(text, encoding="utf-8")
        if system.prints_id:
            try:
                answer = ask_client(self.command, system.hand_over_input(job))
            except ClientFailed:
                self._remove_files()
                raise
            return self._record(system.id_of(job, answer)), 0
        return self._run_client(detach=detach)

    def _remove_files(self) -> None:
        """Remove what was written: a run folder whose job was refused is free again."""
        shutil.rmtree(self.job.folder)
        with suppress(OSError):  # not empty
            self.job.folder.parent.rmdir()
            self.job.out.rmdir()

    def _run_client(self, *, detach: bool) -> tuple[SubmittedJob, int]:
        """Run a client that lives as long as the job; Ctrl-C reaches it, unless it is detached."""
        folder = self.job.folder
        if detach:
            with (folder / OUTPUT_FILE).open("w", encoding="utf-8") as out:
                subprocess.Popen(
                    ["sh", "-c", _DETACHED, str(folder), *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            while not (folder / "pid").exists():
                time.sleep(0.01)
            return self._record((folder / "pid").read_text("utf-8").strip()), 0
        with subprocess.Popen(self.command) as client:
            submitted = self._record(str(client.pid))
            code = _wait(client)
        (folder / EXIT_CODE_FILE).write_text(f"{code}\n", encoding="utf-8")
        return submitted, code

    def _record(self, job_id: str) -> SubmittedJob:
        job = self.job
        submitted = SubmittedJob(
            system=self.system.name,
            id=job_id,
            command=job.command,
            file=str(job.file),
            nodes=job.nodes,
            per=job.per,
            submitted=time.time(),
            folder=str(job.folder),
            host=socket.gethostname(),
            options=self.system.chosen.model_dump(mode="json"),
        )
        write_submitted(submitted)
        return submitted


def _wait(client: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a client, 130 after Ctrl-C."""
    code, stopped = None, False
    while code is None:
        try:
            code = client.wait()
        except KeyboardInterrupt:  # the client has got it as well, and ends its ranks
            stopped = True
    return Stopped.code if stopped else code


def make_submission(
    source: CheckedSource, on: str | None, command: str, file: Path, arguments: Sequence[str]
) -> Submission:
    """Return the job for `unipar COMMAND FILE ARGUMENTS` if it can be handed over; raise with each reason if not."""
    config = source.config
    machines = config.machines or Machines()
    name = on or machines.on
    if name is None:
        raise ConfigError(f"machines.on: name a job system, there or with --on: {', '.join(job_system_names())}")
    kind = find_job_system(name)
    nodes, per = settle_machines(config, counts_gpus=kind.counts_gpus)
    _check_config(source, nodes * per if per is not None else lcm(nodes, config.parallel.axes.fewest_ranks))
    out = _free_folder(source, command, overwrite="--overwrite" in arguments)
    system = kind.of(machines.options.get(name, {}))
    if config.launch.restarts and command == "run":  # the job system counts them, and the ranks refuse what they cannot
        arguments = [*arguments, "--set", "launch.restarts=0"]
    job = NewJob(
        name=out.name,
        command=command,
        file=file.resolve(),
        arguments=tuple(arguments),
        out=out.absolute(),
        folder=_free_submission(out.absolute()),
        config=config,
        nodes=nodes,
        per=per,
    )
    reasons = [*_refuse_restarts(config), *system.refuse(job)]
    if reasons:
        raise Unsupported(f"machines.on: {name}", reasons)
    return Submission(job, system, system.texts(job))


def settle_machines(config: Config, *, counts_gpus: bool = False) -> tuple[int, int | None]:
    """Return the number of machines and of ranks on each; raise ConfigError, which shows the arithmetic, if wrong.

    None: the config leaves the ranks open, and the job `counts_gpus` of its machines.
    """
    machines, ranks, axes = config.machines or Machines(), config.parallel.ranks, config.parallel.axes
    nodes, per = machines.nodes, machines.ranks_per_node
    if isinstance(ranks, int):
        world = f"parallel.data ({config.parallel.data})"
        world += f" x {replace(axes, expert=1)} = {count_of(ranks, 'rank')}" if axes.ranks > 1 else ""
    else:
        world = "parallel.data (auto)"
    if per == "auto":
        if isinstance(ranks, str):
            if counts_gpus and config.device in ("auto", "cuda"):
                return nodes, None
            raise ConfigError(
                f"machines.ranks_per_node: {world} does not say how many ranks a machine has, and its GPUs cannot be "
                f"counted from here: set machines.ranks_per_node, or parallel.data"
            )
        per, left = divmod(ranks, nodes)
        if left:
            lower, upper = per * nodes, (per + 1) * nodes
            near = f"{lower} or {upper}" if lower else str(upper)
            raise ConfigError(
                f"machines.nodes ({nodes}) does not divide {world}: {ranks} / {nodes} leaves {left}; take "
                f"{near} ranks, or another number of machines"
            )
    elif isinstance(ranks, int) and nodes * per != ranks:
        raise ConfigError(
            f"machines.nodes x machines.ranks_per_node = {nodes} x {per} = {nodes * per}, and {world}: make them "
            "equal, or leave machines.ranks_per_node out"
        )
    return nodes, per


def _check_config(source: CheckedSource, ranks: int) -> None:
    """Raise with each reason why the config cannot run on this many ranks; libraries may be missing on this machine."""
    config, strategy, backend = source.config, source.strategy, source.backend
    if source.alone and ranks > 1:
        raise ConfigError(
            f"backend: {strategy} is one process, and machines asks for {count_of(ranks, 'rank')}: choose another "
            "strategy"
        )
    if reasons := list(checks.list_refusals(backend, config, strategy)):
        raise Unsupported(str(Strategy(backend.name, config.parallel.shard, axes=strategy.axes)), reasons)
    check_offers(backend, strategy)
    if config.batch.is_auto:
        raise ConfigError(
            "batch.micro: auto is found by trials in processes that unipar starts, not under a job system; "
            "write a number, which `unipar plan FILE --memory SIZE` predicts"
        )
    SettledConfig.of(config, strategy, ranks, "cpu" if config.device == "cpu" else "cuda")
    TaskRef.of(None, config.task, {}).check_code()


def _refuse_restarts(config: Config) -> Iterator[str]:
    if config.launch.restarts and config.checkpoint is None and config.resume != "never":
        yield (
            f"launch.restarts: {config.launch.restarts}, and the config has no section checkpoint, so there is no "
            "state to go on from: give it the section, or `resume: never`, which begins anew each time"
        )


def _free_folder(source: CheckedSource, command: str, *, overwrite: bool) -> Path:
    """Return the run folder: the config's, or the first of runs/NAME, runs/NAME-2, ... that is free."""
    alone = source.config.out is not None
    if source.config.resume == "auto" and command == "run":
        return run_folder.newest_run_folder(source.out, alone=alone) or source.out
    if alone or overwrite or command != "run":
        if command == "run" and not overwrite:
            run_folder.check_run_folder(source.out, overwrite=False)
        return source.out
    return next(out for out in numbered_folders(source.out) if run_folder.is_free(out))


def _free_submission(out: Path) -> Path:
    """Return the first of OUT/submit/1, OUT/submit/2, ... that does not exist."""
    if os.path.lexists(out) and not out.is_dir():
        raise OutExists(f"out: {out} is a file; name another folder (out: ..., or --out DIR)")
    return next(at for number in count(1) if not os.path.lexists(at := out / SUBMISSIONS / str(number)))
