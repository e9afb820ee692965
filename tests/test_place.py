"""Who started this process: told from its variables alone, by data that backends bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar import registry
from unipar.errors import WorldMismatch
from unipar.place import Place, probe, without_launcher_arguments

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
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "launcher", "hosted"),
    [
        (TORCHRUN, "torchrun", True),
        (TORCHRUN | SLURM, "torchrun", True),
        (ACCELERATE, "accelerate launch", True),
        (DEEPSPEED, "deepspeed", False),
    ],
)
def test_launchers_with_an_address(environ: dict[str, str], launcher: str, hosted: bool) -> None:
    """Rank, size and the address where the processes meet, as facts of the environment."""
    assert probe(registry.launchers(), None, environ) == Place(
        rank=1, size=2, local_rank=1, local_size=2, launcher=launcher, address=("127.0.0.1", 29500), hosted=hosted
    )


def test_a_launcher_without_an_address(tmp_path: Path) -> None:
    """horovodrun's processes meet by a file of the run, named after the job."""
    assert probe(registry.launchers(), tmp_path, HOROVODRUN) == Place(
        rank=1, size=2, local_rank=1, local_size=2, launcher="horovodrun", folder=tmp_path, job="4711"
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ],
)
def test_nobody(environ: dict[str, str]) -> None:
    """A batch script's variables, or an address alone, make no world."""
    assert probe(registry.launchers(), None, environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
         "accelerate launch without a world: it started one process only, as it does with --cpu; add --multi_gpu, "
         "which also starts processes on a machine without a GPU, or run the script with python"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
         "mpirun: joining its worlds is not there yet; start the same script with python or torchrun"),
        (SLURM, "srun: joining its worlds is not there yet; let srun start one task that runs python or torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"},
         "RANK and WORLD_SIZE: variables of a launcher that is not known here; use torchrun, or unset them"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "torchrun should have set MASTER_ADDR to rank 0's address; it is 'not set'"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "torchrun should have set WORLD_SIZE to a number; it is 'two'"),
    ],
)  # fmt: skip
def test_worlds_that_cannot_be_joined(environ: dict[str, str], message: str) -> None:
    """Left alone, N processes would each train a world of one."""
    with pytest.raises(WorldMismatch) as e:
        probe(registry.launchers(), None, environ)
    assert str(e.value) == message


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
