"""Restarts by torchrun and Slurm, from their variables."""

from __future__ import annotations

import pytest

from unipar.distributed.restarts import find_job


@pytest.mark.parametrize(
    ("variables", "said", "clock"),
    [
        ({}, "", False),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}, "", False),
        (
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "3"},
            "torchrun has restarted this run (3)",
            True,
        ),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "", False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "Slurm has requeued this job (1)", False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "x"}, "", False),
    ],
)
def test_who_has_started_the_job_again(variables: dict[str, str], said: str, clock: bool) -> None:
    """A count above 0; a requeue has a new time limit."""
    job = find_job(variables)
    assert (job.restarted_by, job.same_clock) == (said, clock)


def test_names_of_a_job() -> None:
    """An id of its own, the agent's process, the job's number; `none` is every static rendezvous' id, and no name."""
    names = find_job({"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "big"}).names
    assert (names[0], names[2]) == ("torchrun a", "slurm big 7")
    assert names[1].startswith("torchrun agent ")
    (agent,) = find_job({"TORCHELASTIC_RUN_ID": "none"}).names
    assert agent == names[1]
    requeued = find_job({"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    assert requeued.restarted_names == ("slurm  7",)
