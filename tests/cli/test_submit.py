"""`unipar submit` and `unipar jobs`: words on the command line, and what is printed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.submissions import write_config
from unipar.cli.commands.machines.jobs import format_jobs
from unipar.config.job_system import SubmittedJob
from unipar.jobs.submitted import write_submitted


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_print_writes_nothing(here: Path, unipar: Any) -> None:
    """The files with their paths, then the command; the exit code is 0 without sbatch, too."""
    write_config(here, "machines: {on: slurm, nodes: 2, ranks_per_node: 2, slurm: {check: false}}\n")
    told = unipar("submit", "x.yaml", "--print", "--set", "train.steps=3", "--set", "machines.slurm.partition=gpu")
    assert (told.code, told.err) == (0, "")
    lines = told.out.splitlines()
    assert lines[:2] == [f"# {here}/runs/x/submit/1/run.sbatch", "#!/bin/bash"]
    assert "#SBATCH --partition=gpu" in lines
    assert f"python -m unipar run {here}/x.yaml --set train.steps=3 --out {here}/runs/x\n" in told.out
    assert lines[-1] == f"$ sbatch --parsable --export=ALL {here}/runs/x/submit/1/run.sbatch"
    assert os.listdir(here) == ["x.yaml"]


@pytest.mark.parametrize("on", ["slurm", "kubernetes", "ray", "mpi"])
@pytest.mark.parametrize("command", ["run", "compare", "verify"])
def test_each_command_on_each(here: Path, unipar: Any, on: str, command: str) -> None:
    """The command is in what is printed, with its own options."""
    mpi, image = "mpi: {hosts: [localhost]}", "kubernetes: {image: a:1}"
    write_config(here, f"machines: {{ranks_per_node: 2, {mpi}, {image}}}\n")
    options = ["--backend", "native/parameters"] if command == "run" else ["--strategy", "horovod,native/nothing"]
    told = unipar("submit", command, "x.yaml", "--on", on, "--print", *options)
    assert told.code == 0, told.err
    plain = told.out.replace("'", "").replace(",", "")
    assert f"{command} x.yaml" in plain.replace(f"{here}/", "")
    assert options[1].replace(",", "") in plain


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x.yaml", "y.yaml"], "write [COMMAND] FILE, with COMMAND one of run, compare, scale, verify: submit compare"),
        (["run", "x.yaml", "--world", "1,2"], "--world is not for run, which has --backend, --resume, --detach"),
        (["compare", "x.yaml", "--backend", "horovod"], "--backend is not for compare, which has --strategy, --detach"),
        (["scale", "x.yaml"], "scale needs --world, numbers of ranks: --world 8,16,32"),
    ],
)
def test_words_that_do_not_fit(here: Path, unipar: Any, words: list[str], sentence: str) -> None:
    """Which options a command has."""
    write_config(here, "machines: {on: slurm, ranks_per_node: 2}\n")
    told = unipar("submit", *words)
    assert told.code == 2
    assert sentence in " ".join(told.err.replace("│", "").split())


def test_scale_is_a_job_for_each_size(here: Path, unipar: Any) -> None:
    """Machines follow from the ranks; the total batch is that of the smallest."""
    text = write_config(here, "machines: {on: slurm, ranks_per_node: 2}\n").read_text("utf-8")
    (here / "x.yaml").write_text(text.replace("{total: 8}", "{micro: 4, accumulate: 1}"), encoding="utf-8")
    told = unipar("submit", "scale", "x.yaml", "--world", "1,2,4", "--print")
    assert told.code == 0, told.err
    folders = [line for line in told.out.splitlines() if line.startswith("# /")]
    assert folders == [f"# {here}/runs/x/worlds/world-{n}/submit/1/run.sbatch" for n in (1, 2, 4)]
    nodes = [line for line in told.out.splitlines() if line.startswith(("#SBATCH --nodes", "#SBATCH --ntasks"))]
    assert [line.partition("--")[2] for line in nodes] == [
        *("nodes=1", "ntasks-per-node=1", "nodes=1", "ntasks-per-node=2", "nodes=2", "ntasks-per-node=2"),
    ]
    runs = [line for line in told.out.splitlines() if " -m unipar compare " in line]
    batch = "--set batch.total=4 --set batch.micro=null"
    for n, line in zip((1, 2, 4), runs, strict=True):
        wanted = f"--set parallel.data={n} {batch} --strategy native/nothing --out {here}/runs/x/worlds/world-{n}"
        assert line.endswith(f"compare {here}/x.yaml {wanted}")


@pytest.mark.parametrize(
    ("world", "sets", "sentence"),
    [
        (
            "2,3",
            "machines.ranks_per_node=2",
            "--world: 3 ranks do not fill machines of 2 (machines.ranks_per_node); take multiples",
        ),
        ("2,3", "parallel.tensor=2", "--world: 3 ranks cannot be divided into tensor 2 (2 ranks each)"),
        (
            "2",
            "machines.ranks_per_node=2",
            "--world: 2 does not scale: give two sizes or more, each of at least 1 (--world 1,2)",
        ),
    ],
)
def test_sizes_that_do_not_fit(here: Path, unipar: Any, world: str, sets: str, sentence: str) -> None:
    """Before any job is handed over."""
    write_config(here, "machines: {on: slurm, ranks_per_node: 2}\n")
    told = unipar("submit", "scale", "x.yaml", "--world", world, "--set", sets)
    assert (told.code, told.err) == (2, f"unipar: {sentence}\n")


def job(here: Path, **changes: Any) -> SubmittedJob:
    told: dict[str, Any] = {"system": "mpi", "id": "99999999", "command": "run", "file": "x.yaml", "nodes": 2, "per": 4}
    told |= {"submitted": 0.0, "folder": str(here / "runs/x/submit/1"), "host": os.uname().nodename} | changes
    return SubmittedJob(**told)


def test_the_table(here: Path, unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each job, the latest last; --json has everything. A job that is a process needs no mpirun for that."""
    monkeypatch.setenv("PATH", str(here))
    for name, code, at in (("y", "1", 2.0), ("x", "0", 1.0)):
        folder = here / f"runs/{name}/submit/1"
        folder.mkdir(parents=True)
        (folder / "exit-code").write_text(f"{code}\n", encoding="utf-8")
        write_submitted(job(here, folder=str(folder), submitted=at))
    told = unipar("jobs")
    assert told.code == 0
    assert [line.split()[:1] + line.split()[2:6] for line in told.out.splitlines()[1:]] == [
        ["mpi", "run", "2", "x", "4"],
        ["mpi", "run", "2", "x", "4"],
    ]
    assert [line.split()[-1] for line in told.out.splitlines()] == ["folder", "runs/x", "runs/y"]
    assert [one["state"] for one in json.loads(unipar("jobs", "--json").out)] == ["ended", "failed (1)"]


def test_a_narrow_terminal(here: Path) -> None:
    """Lines of 80 characters; a state that is a sentence is below the table."""
    jobs = [job(here, folder=str(here / f"runs/{'long_' * 6}{n}/submit/1"), submitted=1e12) for n in range(2)]
    jobs[1] = job(here, folder=jobs[1].folder, submitted=1e12, per=None)
    text = format_jobs(jobs, ["running", "unknown: squeue not found here"], 80)
    assert text.splitlines()[:3] == [
        "on   job       what  machines  state    since  folder",
        "mpi  99999999  run   2 x 4     running    0 s  runs/long_long_long_long_long_lon",
        " " * 47 + "g_0",
    ]
    assert text.splitlines()[3].split()[3:6] == ["2", "x", "all"]
    assert text.splitlines()[3].split()[6:] == ["unknown", "0", "s", "runs/long_long_long_long_long_lon"]
    assert text.splitlines()[-1] == "99999999: unknown: squeue not found here"
    assert max(map(len, text.splitlines())) <= 80


def test_nothing_was_submitted(here: Path, unipar: Any) -> None:
    """With the way to do so; an id that is not there names those that are."""
    assert unipar("jobs").out == "nothing was submitted from runs; see `unipar submit --help`\n"
    told = unipar("jobs", "logs", "4711")
    assert (told.code, told.err) == (
        2,
        "unipar: no job '4711' was submitted from runs; its latest: none (`unipar jobs`)\n",
    )


def test_a_file_that_is_broken(here: Path, unipar: Any) -> None:
    """Its path."""
    file = here / "runs/x/submit/1/submitted.json"
    file.parent.mkdir(parents=True)
    file.write_text("{", encoding="utf-8")
    told = unipar("jobs")
    assert (told.code, told.err) == (
        2,
        "unipar: runs/x/submit/1/submitted.json cannot be read: it was not written by unipar submit, or is truncated\n",
    )


@pytest.mark.parametrize("words", [["submit"], ["jobs"], ["jobs", "logs"], ["jobs", "cancel"], ["jobs", "collect"]])
def test_help_has_examples(unipar: Any, words: list[str]) -> None:
    """As every command's."""
    told = unipar(*words, "--help")
    assert told.code == 0
    assert f"unipar {' '.join(words)} " in told.out or f"unipar {' '.join(words)}\n" in told.out
