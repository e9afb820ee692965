"""Launchers that every backend may be started by: torchrun, srun, mpirun, or whoever set RANK and WORLD_SIZE."""

from __future__ import annotations

from typing import Final

from unipar.distributed.launchers import TORCH_VARIABLES, Launcher

_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")

KNOWN_LAUNCHERS: Final = (
    Launcher(
        name="torchrun",
        order=20,
        marks=("TORCHELASTIC_RUN_ID",),
        **TORCH_VARIABLES,
        address=_MASTER_VARIABLES,
        opens="its agent listens on every interface (the master port, and two more with --standalone)",
    ),
    Launcher(
        name="whoever set RANK and WORLD_SIZE",
        order=40,
        marks=("RANK", "WORLD_SIZE", *_MASTER_VARIABLES),
        **TORCH_VARIABLES,
        local=False,
        address=_MASTER_VARIABLES,
    ),
    Launcher(
        name="mpirun",
        order=50,
        marks=("OMPI_COMM_WORLD_RANK",),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
        passed_on=_MASTER_VARIABLES,
        opens="it listens on every interface while it runs",
    ),
    Launcher(
        name="srun",
        order=60,
        marks=("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        passed_on=_MASTER_VARIABLES,
        nodes="SLURM_STEP_NODELIST",
        least=2,
        opens="it listens on every interface for its tasks' output; Slurm's daemons do at their own ports",
    ),
    Launcher(
        name="RANK and WORLD_SIZE",
        order=70,
        marks=("RANK", "WORLD_SIZE"),
        **TORCH_VARIABLES,
        refusal="they are set without MASTER_ADDR and MASTER_PORT, so the ranks cannot meet; set these too, unset "
        "all of them, or use torchrun",
    ),
)
