"""What is checked before a job is handed over, and where it is kept."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.support.submissions import submission, write_config
from unipar.config.job_system import find_job_system, job_system_names
from unipar.errors import ConfigError, OutExists, UniparError, Unsupported, WorldMismatch
from unipar.jobs.client import ClientFailed
from unipar.jobs.submitted import find_submitted, list_submitted, state_of
from unipar.launcher.preparation.prepare import prepare

PROGRAM = """#!{python}
import sys
read = sys.stdin.read() if "/dev/stdin" in sys.argv else ""
print(sys.argv[1:], read, file=open({told!r}, "a"))
print("Job 'raysubmit_1' submitted successfully" if "ray" in sys.argv[0] else "4711")
"""
"""A program in the place of sbatch and its like, which need a cluster: it keeps what it is told, and answers."""

SECRET = "a-value-that-no-file-may-hold"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def program(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PROGRAM under the names of all clients; returns the file that it writes."""
    folder = here / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "kubectl", "ray"):
        file = folder / name
        file.write_text(PROGRAM.format(python=sys.executable, told=str(here / "told")), encoding="utf-8")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return here / "told"


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (
            ["machines.nodes=2", "parallel.data=3"],
            "machines.nodes (2) does not divide parallel.data (3): 3 / 2 leaves 1; take 2 or 4 ranks, or another "
            "number of machines",
        ),
        (
            ["machines.nodes=2", "machines.ranks_per_node=4", "parallel.data=4"],
            "machines.nodes x machines.ranks_per_node = 2 x 4 = 8, and parallel.data (4): make them equal, or leave "
            "machines.ranks_per_node out",
        ),
        (
            ["machines.nodes=2", "machines.ranks_per_node=2", "parallel.data=4", "parallel.tensor=2"],
            "machines.nodes x machines.ranks_per_node = 2 x 2 = 4, and parallel.data (4) x tensor 2 = 8 ranks: make "
            "them equal, or leave machines.ranks_per_node out",
        ),
        (
            ["machines.nodes=2"],
            "machines.ranks_per_node: parallel.data (auto) does not say how many ranks a machine has, and its GPUs "
            "cannot be counted from here: set machines.ranks_per_node, or parallel.data",
        ),
        (
            ["machines.nodes=3", "machines.ranks_per_node=1"],
            "batch.total (8) is not a multiple of accumulate x data (1 x 3 = 3); the nearest totals are 6 and 9",
        ),
        (
            ["machines.ranks_per_node=2", "batch.micro=auto", "batch.memory=1GiB"],
            "batch.micro: auto is found by trials in processes that unipar starts, not under a job system; write "
            "a number, which `unipar plan FILE --memory SIZE` predicts",
        ),
        (
            ["machines.ranks_per_node=2", "backend=single"],
            "backend: single is one process, and machines asks for 2 ranks: choose another strategy",
        ),
    ],
)
def test_numbers_that_do_not_fit(here: Path, sets: list[str], sentence: str) -> None:
    """The arithmetic and the way out, and nothing is written."""
    file = write_config(here)
    with pytest.raises(ConfigError) as e:
        submission(file, "slurm", sets)
    assert str(e.value) == sentence
    assert os.listdir(here) == ["x.yaml"]


@pytest.mark.parametrize(
    ("sets", "size"),
    [
        (["machines.nodes=2", "parallel.data=4"], (2, 2)),
        (["machines.nodes=2", "parallel.data=2", "parallel.tensor=2"], (2, 2)),
        (["machines.nodes=2", "machines.ranks_per_node=4"], (2, 4)),
        (["parallel.data=2"], (1, 2)),
    ],
)
def test_machines_and_ranks(here: Path, sets: list[str], size: tuple[int, int]) -> None:
    """`per` is the world divided by the machines, unless it is given."""
    job = submission(write_config(here), "slurm", sets).job
    assert (job.nodes, job.per) == size


def test_restarts_need_checkpoints(here: Path) -> None:
    """A requeued job would begin anew without a word."""
    file, sets = write_config(here), ["machines.ranks_per_node=2", "launch.restarts=2"]
    with pytest.raises(Unsupported) as e:
        submission(file, "slurm", sets)
    assert str(e.value) == (
        "machines.on: slurm: launch.restarts: 2, and the config has no section checkpoint, so there is no state to go "
        "on from: give it the section, or `resume: never`, which begins anew each time"
    )
    assert submission(file, "slurm", [*sets, "resume=never"]).job.ranks == 2
    assert submission(file, "slurm", [*sets, "checkpoint.every=5"]).job.ranks == 2


@pytest.mark.parametrize("on", ["slurm", "kubernetes", "ray", "mpi"])
def test_without_the_client(here: Path, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence with the way out, before anything is written."""
    monkeypatch.setenv("PATH", str(here))
    sets = ["machines.ranks_per_node=2", "machines.kubernetes.image=a:1", "machines.mpi.hosts=[localhost]"]
    made = submission(write_config(here), on, sets)
    with pytest.raises(ClientFailed) as e:
        made.hand_over()
    first, _, way = str(e.value).partition(" not found here: ")
    assert first == f"machines.on: {on}: " + ", ".join(find_job_system(on).clients)
    assert way == find_job_system(on).remedy
    assert os.listdir(here) == ["x.yaml"]


def test_the_four_are_entry_points() -> None:
    """Found in the same way as anyone's."""
    assert {"slurm", "kubernetes", "ray", "mpi"} <= set(job_system_names())
    with pytest.raises(ConfigError) as e:
        find_job_system("slurmm")
    assert str(e.value).startswith("no job system 'slurmm'; did you mean 'slurm'? known: ")


def test_none_is_named(here: Path) -> None:
    """Neither in the config nor with --on."""
    with pytest.raises(ConfigError) as e:
        submission(write_config(here), "")
    assert str(e.value).startswith("machines.on: name a job system, there or with --on: ")


@pytest.mark.parametrize("on", ["slurm", "kubernetes", "ray"])
def test_a_secret_is_in_no_file(here: Path, on: str, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is; the value goes to Ray through a pipe, stays in the environment for Slurm, or in the cluster."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    secrets = "{WANDB_API_KEY: keys/wandb}" if on == "kubernetes" else "[WANDB_API_KEY]"
    sets = ["machines.ranks_per_node=2", "machines.kubernetes.image=a:1", f"machines.{on}.secrets={secrets}"]
    made = submission(write_config(here), on, sets)
    job, _ = made.hand_over()
    told = program.read_text("utf-8")
    program.unlink()
    assert (SECRET in told) == (on == "ray")
    assert SECRET not in " ".join(made.command)
    files = [file for file in here.rglob("*") if file.is_file()]
    assert len(files) > 3
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert "WANDB_API_KEY" in json.dumps(job.options)


@pytest.mark.parametrize("on", ["slurm", "ray", "mpi"])
def test_a_secret_that_is_not_set(here: Path, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job would fail much later."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    sets = ["machines.ranks_per_node=2", "machines.mpi.hosts=[localhost]", f"machines.{on}.secrets=[HF_TOKEN, HOME]"]
    with pytest.raises(Unsupported) as e:
        submission(write_config(here), on, sets)
    assert str(e.value) == (
        f"machines.on: {on}: machines.{on}.secrets: HF_TOKEN not set here; export it, or leave it out"
    )


def test_a_submitted_job_is_found_again(here: Path, program: Path) -> None:
    """With a run folder of its own, which neither a further submission nor a run takes."""
    file = write_config(here)
    first, code = submission(file, "slurm", ["machines.ranks_per_node=2"]).hand_over()
    second, _ = submission(file, "slurm", ["machines.ranks_per_node=2"]).hand_over()
    assert (first.id, first.system, first.nodes, first.per, code) == ("4711", "slurm", 1, 2, 0)
    assert first.folder == str(here / "runs/x/submit/1")
    assert second.folder == str(here / "runs/x-2/submit/1")
    assert list_submitted(here / "runs") == [first, second]
    assert find_submitted(here / "runs", first.folder) == first
    assert state_of(first) == "4711"  # the program's answer
    with pytest.raises(UniparError) as e:
        find_submitted(here / "runs", "12")
    assert str(e.value) == f"no job '12' was submitted from {here}/runs; its latest: 4711, 4711 (`unipar jobs`)"


def test_the_end_of_a_job_is_kept(here: Path, program: Path) -> None:
    """Slurm forgets a job some minutes after its end; a state that may change is asked for each time."""
    job, _ = submission(write_config(here), "slurm", ["machines.ranks_per_node=2"]).hand_over()
    squeue = here / "bin/squeue"
    found: list[str] = []
    for said in ("RUNNING", "FAILED", "PENDING", "COMPLETED", "INVALID"):
        squeue.write_text(f"#!/bin/sh\necho {said}\n", "utf-8")
        found.append(state_of(job))
    assert found == ["running", "failed", "pending", "completed", "completed"]
    assert (Path(job.folder) / "state").read_text("utf-8") == "completed\n"


def test_a_client_that_fails(here: Path, program: Path) -> None:
    """Its own words, with the command; the run folder is free again."""
    (here / "bin/sbatch").write_text("#!/bin/sh\necho 'invalid partition specified: gpus' >&2; exit 1\n", "utf-8")
    made = submission(write_config(here), "slurm", ["machines.ranks_per_node=2"])
    with pytest.raises(ClientFailed) as e:
        made.hand_over()
    assert str(e.value) == (
        f"sbatch --parsable --export=ALL {here}/runs/x/submit/1/run.sbatch: invalid partition specified: gpus"
    )
    assert os.listdir(here / "runs") == []


def test_a_run_is_there_already(here: Path) -> None:
    """As for a run that is started here."""
    (here / "mine").mkdir()
    (here / "mine/notes").touch()
    with pytest.raises(OutExists) as e:
        submission(write_config(here), "slurm", ["machines.ranks_per_node=2", "out=mine"])
    assert str(e.value).startswith("out: mine already exists; name another folder")


def test_several_machines_without_a_launcher(here: Path) -> None:
    """`unipar run` would train on this machine alone."""
    file = write_config(here, "machines: {on: kubernetes, nodes: 2}\n")
    with pytest.raises(WorldMismatch) as e:
        prepare(file)
    assert str(e.value) == (
        "machines.nodes: 2, and unipar starts ranks on this machine alone: hand the run over with `unipar submit FILE "
        "--on kubernetes`, start it with a launcher on all machines (torchrun, srun, mpirun), or "
        "try it here with --set machines.nodes=1"
    )
    assert prepare(file, overrides={"machines.nodes": 1}).place is None
