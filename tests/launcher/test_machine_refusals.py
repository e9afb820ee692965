"""What cannot be run over two machines: a sentence before the first step, on both the same."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.support.machine_launches import Job
from tests.support.machine_runs import Started
from tests.support.machines.machine import Machine, reason_no_firewall
from tests.support.machines.start import machines, reason_no_machines
from tests.support.programs import skip_because
from tests.support.tiny import __file__ as TINY
from tests.support.world import ROOT

pytestmark = skip_because(reason_no_machines())

NODES = "node1 (10.213.7.1): rank 0; node2 (10.213.7.2): rank 1"
DIFFERS = "node2 (10.213.7.2) (rank 1) and node1 (10.213.7.1) (rank 0) do not run the same: "


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Generator[Job]:
    with machines(2, tmp_path_factory.mktemp("machines")) as made:
        yield Job(made, (1, 1))


def put_task(machine: Machine, more: str = "") -> None:
    machine.path("/tmp/task.py").write_text(Path(TINY).read_text("utf-8") + more, encoding="utf-8")


def put_other_task(machine: Machine) -> None:
    put_task(machine, "# mine\n")


def put_library(machine: Machine) -> None:
    """Another version of torch, as far as its package says."""
    folder = machine.path("/tmp/other/torch-9.9.dist-info")
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n", encoding="utf-8")


def put_run(machine: Machine) -> None:
    """Something else where the run is to write."""
    machine.path("/tmp/taken").mkdir()
    machine.path("/tmp/taken/mine.txt").write_text("", encoding="utf-8")


def put_nothing(machine: Machine) -> None: ...


@pytest.mark.parametrize(
    ("first", "second", "more", "sentence"),
    [
        (put_task, put_other_task, ["--set", "task.use=/tmp/task.py:Tiny"],
         f"{DIFFERS}the file task.py differs; copy the same files to all machines"),
        (put_nothing, put_nothing, ["--set", "machines.nodes=3"],
         f"machines.nodes: 3, and whoever set RANK and WORLD_SIZE has started ranks on 2 machines ({NODES}): start it "
         "on 3, or change machines.nodes"),
        pytest.param(put_nothing, put_nothing, ["--set", "machines.nodes=2", "--set", "machines.ranks_per_node=2"],
         f"machines.ranks_per_node: 2, and whoever set RANK and WORLD_SIZE has started 1 rank on a machine ({NODES}): "
         "start 2 on each, or change machines.ranks_per_node", marks=pytest.mark.sweep),
        pytest.param(
            put_nothing, put_nothing, ["--set", "machines.folder=shared", "--out", "/tmp/mine"],
            "node2 (10.213.7.2): machines.folder: shared, and /tmp/mine is not the folder that rank 0 has made on "
            "node1 (10.213.7.1): name a folder on a file system that all machines mount (out: ..., or --out DIR), or "
            "say machines.folder: own, so that each machine writes to its own disk",
            marks=pytest.mark.sweep),
        pytest.param(
            put_nothing, put_run, ["--out", "/tmp/taken"],
            "node2 (10.213.7.2): out: /tmp/taken already exists; name another folder (out: another/folder, or --out "
            "DIR), or overwrite it (--overwrite, or launch(..., overwrite=True))",
            marks=pytest.mark.sweep),
        (put_run, put_nothing, ["--out", "/tmp/taken", "--overwrite"],
         "rank 0 on node1 (10.213.7.1): out: /tmp/taken is not a run folder of unipar (no config.json in it), so it is "
         "not overwritten; name another folder, or remove it yourself"),
    ],
    ids=["code", "nodes", "ranks on each", "folder on one only", "taken on one", "taken by rank 0"],
)  # fmt: skip
def test_a_sentence_on_both(
    first: Callable[[Machine], None],
    second: Callable[[Machine], None],
    more: list[str],
    sentence: str,
    job: Job,
    tmp_path: Path,
) -> None:
    """Whichever machine found it."""
    for machine, put in zip(job.machines, (first, second), strict=True):
        machine.run(["rm", "-rf", "/tmp/taken", "/tmp/mine", "/tmp/task.py"])
        put(machine)
    with Started(job, "by hand", "native", tmp_path / f"run-{abs(hash(sentence))}", more=more) as run:
        done = run.wait()
        assert done.code
        assert done.said == f"node1, node2: {sentence}"
        assert run.left == {}


@pytest.mark.sweep
def test_another_version(job: Job, tmp_path: Path) -> None:
    """Of a library, on one of the machines."""
    put_library(job.machines[1])
    variables = {job.machines[1].number: {"PYTHONPATH": f"/tmp/other:{ROOT}:{ROOT}/backends"}}
    with Started(job, "by hand", "native", tmp_path / "version", variables=variables) as run:
        done = run.wait()
    import torch

    here = torch.__version__
    assert done.said == f"node1, node2: {DIFFERS}torch 9.9 there and {here} here; install one version on all machines"


@skip_because(reason_no_firewall())
def test_no_way_to_rank_0(tmp_path: Path) -> None:
    """Packets between the two are dropped: each says within launch.rendezvous_timeout whom it could not reach."""
    with machines(2, tmp_path / "machines") as (one, two):
        one.drop_packets_from(two)
        more = ["--set", "launch.rendezvous_timeout=5"]
        with Started(Job([one, two], (1, 1)), "by hand", "native", tmp_path / "run", more=more) as run:
            run.wait()
        assert "1 of 2 ranks have met within 5 s (launch.rendezvous_timeout), and rank 1 is missing" in run.said_on(one)
        assert (
            "unipar: rank 1 on node2 could not connect to 10.213.7.1:29400, where rank 0 listens, within 5 s "
            "(launch.rendezvous_timeout): was the launcher started on rank 0's machine, and is there a way to it (a "
            "firewall, another network)?"
        ) in run.said_on(two)
