"""Runs over machines that share nothing but a wire: a covering part of what `make machines` plays.

Each family of launchers but horovodrun and each backend once, ranks placed in turn, Debian's own name with IPv6 alone
beside a second network and a shared run folder; and a machine that is lost. The sweeps play more launchers, each of
these networks and the shared folder by itself, and a machine that is killed.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

import unipar
from tests.support.machine_faults import drill
from tests.support.machine_launches import Job, reason_not_here
from tests.support.machine_runs import Started
from tests.support.machines.slurm import slurm_over
from tests.support.machines.start import machines, reason_no_machines
from tests.support.matrix import CONFIG
from tests.support.programs import reason_no_programs, skip_because
from tests.support.slurm import reason_no_cluster
from unipar.config.config_source import load_config_file
from unipar.results.run_report import Report

pytestmark = skip_because(reason_no_machines())

STRATEGIES = [
    pytest.param("torchrun c10d", "native", (1, 1), marks=pytest.mark.sweep),
    ("torchrun static", "accelerate", (2, 1)),
    pytest.param("accelerate launch", "accelerate", (1, 1), marks=pytest.mark.sweep),
    ("deepspeed", "deepspeed", (1, 1)),
    pytest.param("horovodrun", "horovod", (1, 1), marks=pytest.mark.sweep),
    pytest.param("mpirun", "native", (1, 1), marks=pytest.mark.sweep),
    ("mpirun cyclic", "horovod", (2, 2)),
    ("srun", "native", (1, 1)),
    pytest.param("srun cyclic", "native", (2, 2), marks=pytest.mark.sweep),
]

LOSS = 3.385748267173767
"""After 12 steps with batches of 8 samples, as on one machine."""


KEPT_BY_ALL = {"config.json", "launch.json", *(f"rank-{r}.{kind}" for r in (0, 1) for kind in ("beat", "jsonl"))}
"""Files of a run folder that two ranks on two machines share."""

LOSSES_OF_COUNTED = [5.17612361907959, 4.3037495613098145, 5.804447174072266, 3.1965365409851074]
"""At steps 1, 6, 11 and 12 in one process."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Generator[Job]:
    """Two machines in a Slurm cluster, if there can be one, with an sshd, if they can have one."""
    folder = tmp_path_factory.mktemp("machines")
    with ExitStack() as stack:
        made = stack.enter_context(machines(2, folder, share=[shared], ssh=not reason_no_programs("sshd", "ssh")))
        variables = {} if reason_no_cluster() else stack.enter_context(slurm_over(made))
        yield Job(made, (1, 1), variables)


def expect_equal(run: Started) -> None:
    """Wait for its end: the losses of one machine on each machine, and all ranks in the report on rank 0's."""
    outcome = run.wait()
    assert outcome.code == 0, outcome.said
    size = run.job.size
    if size != 3:  # whose batches have 12 samples
        assert outcome.losses[-1] == (12, pytest.approx(LOSS, rel=1e-6))
    report = Report.read(run.folder_on(run.job.machines[0]))
    assert (report.size, report.steps, len(report.peak_rss)) == (size, 12, size)


@pytest.mark.parametrize(("launcher", "backend", "ranks"), STRATEGIES)
def test_machines_that_share_nothing(
    launcher: str, backend: str, ranks: tuple[int, ...], job: Job, tmp_path: Path
) -> None:
    """The same losses on each machine, and no process is left on any."""
    if why := reason_not_here(launcher, ranks):
        pytest.skip(why)
    name = f"{launcher}-{backend}".replace(" ", "-")
    with Started(dataclasses.replace(job, ranks=ranks), launcher, backend, tmp_path / name) as run:
        expect_equal(run)
        ends = sorted(path.name for path in run.folder_on(job.machines[0]).iterdir() if path.name.endswith(".jsonl"))
        assert ends == [f"rank-{rank}.jsonl" for rank in range(sum(ranks))]


@pytest.mark.sweep
def test_copies_on_machines_with_ranks_in_turn(job: Job, tmp_path: Path) -> None:
    """Ranks 0, 2, 4 and 6 split a copy on one machine: the losses of one process, and the bytes of the plan."""
    if why := reason_not_here("mpirun cyclic", (4, 4)):
        pytest.skip(why)
    text = CONFIG.replace("tiny.py:Tiny", "counted.py:Counted") + "parallel: {shard_over: machine}\n"
    config = tmp_path / "x.yaml"
    config.write_text(text, "utf-8")
    eight = dataclasses.replace(job, ranks=(4, 4))
    with Started(eight, "mpirun cyclic", "native/parameters", tmp_path / "run", config=text) as run:
        outcome = run.wait()
        said = "".join(run.said_on(machine) for machine in job.machines)
    assert outcome.code == 0, outcome.said
    assert [loss for _, loss in outcome.losses] == pytest.approx(LOSSES_OF_COUNTED, rel=1e-6)
    (row,) = unipar.plan(
        load_config_file(config, ["machines.ranks_per_node=4"]), strategies=["native/parameters"], worlds=[8]
    ).rows
    found = sorted(re.findall(r"rank (\d) on (node\d): (\d+), (\d+) across", said))
    sent, across = str(row.sent_bytes), str(row.sent_across)
    assert found == [(str(rank), f"node{1 + rank % 2}", sent, across) for rank in range(8)]
    assert (sent, across) == ("3300", "252")


@pytest.mark.sweep
def test_a_shared_run_folder(job: Job, shared: Path, tmp_path: Path) -> None:
    """Found by looking: one folder with the files of all ranks."""
    with Started(job, "by hand", "native", tmp_path / "by-hand", shared=shared) as run:
        expect_equal(run)
    assert set(os.listdir(shared / "runs/x")) == KEPT_BY_ALL


def test_a_network_with_every_pitfall_and_a_shared_run_folder(tmp_path: Path) -> None:
    """Own names that mean 127.0.1.1, no IPv4 but loopback, a default route that does not lead to other machines.

    The folder is found to be one by looking, and has the files of all ranks.
    """
    (shared := tmp_path / "shared").mkdir()
    folder = tmp_path / "machines"
    with (
        machines(2, folder, hosts="debian", family="ipv6", management=True, share=[shared]) as made,
        Started(Job(made, (1, 1)), "by hand", "native", tmp_path / "run", shared=shared) as run,
    ):
        expect_equal(run)
    assert set(os.listdir(shared / "runs/x")) == KEPT_BY_ALL


@pytest.mark.sweep
def test_own_name_is_loopback(tmp_path: Path) -> None:
    """Debian's /etc/hosts: a machine's own name means 127.0.1.1 to itself."""
    with (
        machines(2, tmp_path / "machines", hosts="debian") as made,
        Started(Job(made, (1, 1)), "torchrun c10d", "deepspeed", tmp_path / "run") as run,
    ):
        expect_equal(run)


@pytest.mark.sweep
def test_ipv6_alone_beside_a_management_network(tmp_path: Path) -> None:
    """No IPv4 but loopback; own name and default route belong to a network that does not lead to other machines."""
    with (
        machines(2, tmp_path / "machines", family="ipv6", management=True) as made,
        Started(Job(made, (1, 1)), "torchrun static", "native", tmp_path / "run") as run,
    ):
        expect_equal(run)


LOST = r"{}, was lost after step \d+: {}"
CLOSED = r"its connection was (closed|reset); its own log may say why"
SILENT = r"nothing was heard of it for 10 s \(launch.heartbeat\): is the machine up, and is there a way to it\?"
NODE1, NODE2 = r"node1 \(10\.213\.7\.1\), rank 0", r"node2 \(10\.213\.7\.2\), rank 1"


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        pytest.param("machine killed", {"node1": LOST.format(NODE2, CLOSED)}, marks=pytest.mark.sweep),
        ("cable pulled", {"node1": LOST.format(NODE2, SILENT), "node2": LOST.format(NODE1, SILENT)}),
    ],
)
def test_a_machine_is_lost(fault: str, sentences: dict[str, str], tmp_path: Path) -> None:
    """Each machine that is left names the other one, and no rank is left anywhere."""
    done = drill(fault, tmp_path, "by hand")
    if done.not_here:
        pytest.skip(done.not_here)
    assert done.left == {}
    for machine, sentence in sentences.items():
        assert done.codes[machine] == 1
        assert re.fullmatch(sentence, done.sentences[machine])
    assert done.seconds < 45
