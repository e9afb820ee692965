"""Slurm: the batch script as text; and jobs that really run, in a cluster of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import environment
from tests.support.programs import skip_because
from tests.support.slurm import Slurm, cluster, reason_no_cluster
from tests.support.submissions import TEXT, submission, text_of, write_config
from unipar.errors import Unsupported
from unipar.jobs.submission import Submission
from unipar.results.run_report import Report
from unipar.run_folder.run_attempts import count_attempts

PYTHON = sys.executable


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def directives(made: Submission) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text_of(made), re.MULTILINE)


def test_its_directives(here: Path) -> None:
    """GPUs by machine and not by task, the signal to the ranks and not to the shell, output in the folder."""
    slurm = "{partition: gpu, account: me, qos: high, exclusive: true, cpus: 8, extra_args: [--mail-type=END]}"
    file = write_config(
        here,
        f"machines: {{nodes: 2, ranks_per_node: 4, time: 1d2h, slurm: {slurm}}}\nlaunch: {{shutdown_timeout: 45}}\n",
    )
    assert directives(submission(file, "slurm", ["device=cuda"])) == [
        "--job-name=x",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--time=1-02:00:00",
        f"--chdir={here}",
        f"--output={here}/runs/x/submit/1/slurm-%j.out",
        "--open-mode=append",
        "--signal=TERM@45",
        "--exclusive",
        "--no-requeue",
        "--mail-type=END",
    ]


@pytest.mark.parametrize(("device", "gpus"), [("cpu", []), ("cuda", ["4"]), ("auto", ["4"]), ("cuda:0", ["1"])])
def test_gpus(here: Path, device: str, gpus: list[str]) -> None:
    """One for each rank, unless all share one; `auto` may be a login node's, which has none."""
    made = submission(write_config(here), "slurm", ["machines.ranks_per_node=4", f"device={device}"])
    assert re.findall(r"--gpus-per-node=(\d+)", text_of(made)) == gpus


def test_all_gpus_of_whole_machines(here: Path) -> None:
    """Where the config leaves the ranks open, the job has its machines alone, and counts GPUs when it starts."""
    made = submission(write_config(here), "slurm", ["machines.nodes=2", "device=auto"])
    asked = [word for word in directives(made) if word.startswith(("--nodes", "--ntasks", "--gpus", "--exclusive"))]
    assert asked == ["--nodes=2", "--exclusive"]
    lines = text_of(made).splitlines()
    assert 'per="${SLURM_GPUS_ON_NODE:-1}"' in lines
    (run,) = [line for line in lines if line.startswith("srun") and "--label" in line]
    assert run == (
        'srun --export=ALL --kill-on-bad-exit=1 --ntasks="$((2 * per))" --ntasks-per-node="$per" --unbuffered '
        "--label \\"
    )


def test_its_steps(here: Path) -> None:
    """Lines before, one look at every machine, then a task for each rank; the interpreter is the one that submits."""
    file = write_config(here, "machines: {nodes: 2, ranks_per_node: 2, setup: [module load CUDA/12]}\n")
    made = submission(file, "slurm", arguments=["--set", "train.steps=3"])
    assert (
        text_of(made).partition("--no-requeue\n")[2]
        == f"""
module load CUDA/12
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"

# One process on each machine first: the same versions and files everywhere, and a way from each to the others.
srun --export=ALL --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 \\
  {PYTHON} -m unipar doctor --across {file} --out {here}/runs/x || exit $?

# A task for each rank; a signal stops all of them at the same step boundary.
srun --export=ALL --kill-on-bad-exit=1 --unbuffered --label \\
  {PYTHON} -m unipar run {file} --set train.steps=3 --out {here}/runs/x
code=$?
exit "$code"
"""
    )
    assert made.command == ["sbatch", "--parsable", "--export=ALL", f"{here}/runs/x/submit/1/run.sbatch"]


def test_restarts_are_requeues(here: Path) -> None:
    """`launch.restarts` is the only count, and the ranks, which would refuse it, have none; what was refused ends."""
    made = submission(
        write_config(here), "slurm", ["machines.ranks_per_node=2", "launch.restarts=3", "checkpoint.every=5"]
    )
    assert "--requeue" in directives(made)
    assert f"--set launch.restarts=0 --out {here}/runs/x\n" in text_of(made)
    assert (
        text_of(made).partition("code=$?\n")[2]
        == """# launch.restarts; what was refused (2, 3) would be refused again
case "$code" in
0 | 2 | 3) ;;
*) [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
"""
    )


@pytest.mark.parametrize(
    ("options", "export"),
    [
        ("{}", "ALL"),
        ("{secrets: [HOME]}", "ALL,HOME"),
        ("{environment: none}", "NONE"),
        ("{environment: none, secrets: [HOME]}", "HOME"),
    ],
)
def test_its_environment(here: Path, options: str, export: str) -> None:
    """Names alone: sbatch takes the values from the environment in which it is called."""
    made = submission(write_config(here), "slurm", ["machines.ranks_per_node=2", f"machines.slurm={options}"])
    assert made.command[2] == f"--export={export}"


def test_an_option_that_is_none(here: Path) -> None:
    """Such an option would be a line of the script."""
    with pytest.raises(Unsupported) as e:
        submission(write_config(here), "slurm", ["machines.ranks_per_node=2", "machines.slurm.extra_args=[reboot]"])
    assert str(e.value) == (
        "machines.on: slurm: machines.slurm.extra_args: 'reboot' is no option; write them as --mail-type=END"
    )


class Site:
    """A cluster, a folder with a config, and commands in both."""

    def __init__(self, slurm: Slurm, folder: Path, more: str) -> None:
        self.slurm, self.folder = slurm, folder
        text = TEXT.replace(":Tiny}", ":Tiny, args: {pause: 0.05}}")
        (folder / "x.yaml").write_text(f"{text}parallel: {{data: 2}}\n{more}", encoding="utf-8")

    def call(self, *words: str) -> str:
        done = subprocess.run(
            self.slurm.inside(list(words)),
            cwd=self.folder,
            env={**environment(self.folder), **self.slurm.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def unipar(self, *words: str) -> str:
        return self.call(PYTHON, "-m", "unipar", *words)

    def state(self, number: int = 0) -> list[str]:
        return self.unipar("jobs").splitlines()[number + 1].split()[:7]

    def wait(self, true: Callable[[], Any], seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, self.unipar("jobs", "logs", "1")
            time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path: Path) -> Generator[Slurm]:
    with cluster(tmp_path / "slurm") as made:
        yield made


CHECKPOINTS = """
checkpoint: {every: 10}
launch: {restarts: 1, shutdown_timeout: 30}
machines: {on: slurm, time: 10m, slurm: {check: false}}
"""


@pytest.mark.slow
@skip_because(reason_no_cluster())
def test_a_requeued_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """TERM stops both ranks at one step boundary; the same job starts again, from the checkpoint, once."""
    site = Site(slurm, tmp_path, CHECKPOINTS)
    said = site.unipar("submit", "x.yaml", "--set", "train.steps=60")
    assert said.splitlines()[0] == f"slurm job 1: 1 machine x 2 ranks, {tmp_path}/runs/x"
    site.wait(lambda: (tmp_path / "runs/x/checkpoints/step-00000010").exists())
    assert site.state() == ["slurm", "1", "run", "1", "x", "2", "running"]
    site.call("scancel", "--signal=TERM", "1")
    site.wait(lambda: site.state()[6] == "pending")
    assert "Restarts=1" in site.call("scontrol", "show", "job", "1")
    site.call("scontrol", "update", "JobId=1", "StartTime=now")  # Slurm lets a requeued job wait two minutes
    site.wait(lambda: site.state()[6] == "completed")
    report = Report.read(tmp_path / "runs/x")
    assert (report.size, report.steps) == (2, 60)
    printed = site.unipar("jobs", "logs", "1")
    (stopped,) = set(re.findall(r"unipar: stopped by a signal after step (\d+)", printed))
    assert f"0: goes on after step {stopped} from runs/x/checkpoints/" in printed
    assert count_attempts(tmp_path / "runs/x") == 1


@pytest.mark.slow
@skip_because(reason_no_cluster())
def test_a_job_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    """A cancelled job is not requeued: who ends a job does not want another."""
    site = Site(slurm, tmp_path, CHECKPOINTS)
    site.unipar("submit", "x.yaml", "--set", "train.steps=2000")
    site.wait(lambda: (tmp_path / "runs/x/checkpoints/step-00000010").exists())
    assert site.unipar("jobs", "cancel", "1") == "slurm job 1: asked to end\n"
    site.wait(lambda: site.state()[6] == "cancelled")
    assert "Restarts=0" in site.call("scontrol", "show", "job", "1")


@pytest.mark.slow
@skip_because(reason_no_cluster())
def test_a_rank_fails(slurm: Slurm, tmp_path: Path) -> None:
    """The job fails with it, at once; its state and the rank's own words are shown."""
    site = Site(slurm, tmp_path, "machines: {on: slurm, slurm: {check: false}}\n")
    site.unipar("submit", "x.yaml", "--set", "task.args.fails_on=1")
    site.wait(lambda: site.state()[6] == "failed")
    assert "1: unipar: ValueError: this rank was told to fail" in site.unipar("jobs", "logs", "1")


@pytest.mark.slow
@pytest.mark.skipif(bool(reason_no_cluster()), reason=reason_no_cluster())
def test_a_rank_for_each_gpu(tmp_path: Path) -> None:
    """Slurm gives a job that leaves its ranks open all GPUs of its machine, here two that are not there."""
    with cluster(tmp_path / "slurm", gpus=2) as slurm:
        site = Site(slurm, tmp_path, "")
        (tmp_path / "x.yaml").write_text(TEXT.replace("device: cpu", "device: auto"), encoding="utf-8")
        said = site.unipar("submit", "x.yaml", "--on", "slurm")
        assert said.splitlines()[0] == f"slurm job 1: 1 machine x all GPUs, {tmp_path}/runs/x"
        site.wait(lambda: site.state()[6] == "completed")
    assert Report.read(tmp_path / "runs/x").size == 2
