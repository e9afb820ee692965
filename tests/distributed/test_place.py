"""Who started this process: told from its variables alone, by data that backends bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.backend import registry
from unipar.distributed.launchers import place_from_environment, tasks_per_node, without_launcher_arguments
from unipar.distributed.place import Place
from unipar.errors import WorldMismatch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
ACCELERATE = TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}
DEEPSPEED = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "815", "PMIX_RANK": "1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "launcher", "hosted"),
    [
        (TORCHRUN, "torchrun", True),
        (TORCHRUN | SLURM, "torchrun", True),
        (ACCELERATE, "accelerate launch", True),
        (BY_HAND, "whoever set RANK and WORLD_SIZE", False),
        (BY_HAND | SLURM, "whoever set RANK and WORLD_SIZE", False),
        (BY_HAND | {"MASTER_ADDR": "localhost"} | BATCH, "whoever set RANK and WORLD_SIZE", False),
    ],
)
def test_launchers_with_an_address(environ: dict[str, str], launcher: str, hosted: bool) -> None:
    """Rank, size and the address where the processes meet, as facts of the environment."""
    address = environ["MASTER_ADDR"], 29500
    assert place_from_environment(registry.list_launchers(), None, environ) == Place(
        rank=1, size=2, local_rank=1, local_size=2, launcher=launcher, address=address, hosted=hosted
    )


def test_a_launcher_with_a_process_in_between() -> None:
    """Ranks of `deepspeed` watch the one above their parent."""
    assert place_from_environment(registry.list_launchers(), None, DEEPSPEED) == Place(
        rank=1, size=2, local_rank=1, local_size=2, launcher="deepspeed", address=("127.0.0.1", 29500), between=1
    )


@pytest.mark.parametrize(
    ("environ", "launcher", "job"),
    [
        (HOROVODRUN, "horovodrun", "4711"),
        (HOROVODRUN | SLURM, "horovodrun", "4711"),
        (MPIRUN, "mpirun", "815"),
        (MPIRUN | BATCH, "mpirun", "815"),
        (SLURM, "srun", "7.0"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x1)"}, "srun", "7.0"),
    ],
)
def test_a_launcher_without_an_address(environ: dict[str, str], launcher: str, job: str, tmp_path: Path) -> None:
    """Processes meet by a file of the run, named after the job."""
    place = place_from_environment(registry.list_launchers(), tmp_path, environ)
    assert place == Place(rank=1, size=2, local_rank=1, local_size=2, launcher=launcher, folder=tmp_path, job=job)
    assert place is not None
    assert place.meeting == tmp_path / f".meet-{launcher}-{job}"


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("", []), ("2(x", []), ("a", [])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    """Slurm's way to write many equal numbers."""
    assert tasks_per_node(text) == counts


def test_local_variables_of_ones_own() -> None:
    """Set by hand on several machines, they count; and one loopback address may be several containers'."""
    more = {"MASTER_ADDR": "192.0.2.7", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = place_from_environment(registry.list_launchers(), None, BY_HAND | more)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 4, 0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ],
)
def test_nobody(environ: dict[str, str]) -> None:
    """The variables of a batch script, of `salloc` or of a step with one task, or an address alone, make no world."""
    assert place_from_environment(registry.list_launchers(), None, environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
         "accelerate launch without a world: it started one process only, as it does with --cpu; add --multi_gpu, "
         "which also starts processes on a machine without a GPU, or run the script with python"),
        ({"RANK": "0", "WORLD_SIZE": "2"},
         "RANK and WORLD_SIZE: they are set without MASTER_ADDR and MASTER_PORT, so the ranks cannot meet; set these "
         "too, unset all of them, or use torchrun"),
        (BY_HAND | {"MASTER_ADDR": "192.0.2.7"},
         "whoever set RANK and WORLD_SIZE should have set LOCAL_RANK to a number; it is not set"),
        (MPIRUN | {"PMIX_NAMESPACE": ""}, "mpirun should have set PMIX_NAMESPACE to the job's id; it is not set"),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"},
         "mpirun started 4 processes, 2 of them on this machine, and gives no address where they can meet: pass one on "
         "(mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, HOST being rank 0's machine), or let it start torchrun, "
         "once on each machine"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"},
         "srun should have set SLURM_STEP_NODELIST to the machines; it is not set"),
        (SLURM | {"SLURM_NODEID": "1"},
         "srun should have set SLURM_STEP_TASKS_PER_NODE to the tasks of at least 2 machines; it is '2'"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "torchrun should have set MASTER_ADDR to rank 0's address; it is not set"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "torchrun should have set WORLD_SIZE to a number; it is 'two'"),
    ],
)  # fmt: skip
def test_worlds_that_cannot_be_joined(environ: dict[str, str], message: str) -> None:
    """Left alone, N processes would each train a world of one."""
    with pytest.raises(WorldMismatch) as e:
        place_from_environment(registry.list_launchers(), None, environ)
    assert str(e.value) == message


TWO_NODES = SLURM | {
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "address", "server"),
    [
        (TWO_NODES, ("gpu03", 23673), None),
        (TWO_NODES | {"MASTER_ADDR": "fd00::7", "MASTER_PORT": "4000"}, ("fd00::7", 4000), None),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "4000"}, ("a", 4000), None),
        (HOROVODRUN | {"HOROVOD_SIZE": "4", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a"}, None, ("a", 4711)),
    ],
    ids=["srun", "srun with an address", "mpirun with an address", "horovodrun"],
)
def test_where_ranks_on_several_machines_meet(
    environ: dict[str, str], address: tuple[str, int] | None, server: tuple[str, int] | None
) -> None:
    """At an address that is passed on, else at one made of the first machine and the job's id, or by its server."""
    place = place_from_environment(registry.list_launchers(), Path("run"), environ)
    assert place is not None
    assert (place.address, place.server, place.several_machines, place.meeting) == (address, server, True, None)


@pytest.mark.parametrize(
    ("argv", "left"),
    [
        (["--local_rank=1", "run", "x.yaml"], ["run", "x.yaml"]),
        (["--local-rank", "1", "run", "x.yaml"], ["run", "x.yaml"]),
        (["run", "x.yaml", "--local_rank", "0", "--debug"], ["run", "x.yaml", "--debug"]),
        (["run", "--local_rank", "x.yaml"], ["run", "x.yaml"]),
    ],
)
def test_what_launchers_add_is_swallowed(argv: list[str], left: list[str]) -> None:
    """`deepspeed` puts --local_rank=N first."""
    assert without_launcher_arguments(argv) == left
