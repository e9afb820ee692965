"""The config section `machines`: keys of its own, and options of job systems, which are checked as a backend's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.submissions import write_config
from unipar.backend.checks import read_source
from unipar.config import Config
from unipar.errors import ConfigError


@pytest.mark.parametrize(
    ("machines", "sentence"),
    [
        ("on: slurmm", "machines.on (line 7): no job system 'slurmm'; did you mean 'slurm'? known: "),
        ("node: 2", "machines.node (line 7): there is no such key; did you mean 'nodes'?"),
        ("slrum: {}", "machines.slrum (line 7): there is no such key; did you mean 'slurm'?"),
        ("partition: gpu", "machines.partition (line 7): there is no such key; did you mean machines.slurm.partition?"),
        (
            "zebra: 1",
            "machines.zebra (line 7): there is no such key; machines has on, nodes, ranks_per_node, time, folder, ",
        ),
        (
            "ray: [1]",
            "machines.ray (line 7): wanted a section with the keys address, storage, mount_path, resources, secrets, ",
        ),
        ("slurm: {exclusive: maybe}", "machines.slurm.exclusive (line 7): wanted true or false, got 'maybe'"),
        ("slurm: {partitio: x}", "machines.slurm.partitio (line 7): there is no such key; did you mean 'partition'?"),
        (
            "mpi: {port: 80}",
            "machines.mpi.port (line 7): wanted a whole number of at least 1,024 and of at most 65,535, ",
        ),
        (
            'time: "2:00:00"',
            "machines.time (line 7): '2:00:00' is no duration; write seconds as a number, or d, h, m and s, ",
        ),
        ("ranks_per_node: 0", "machines.ranks_per_node (line 7): wanted a whole number above 0 or auto, got 0"),
    ],
)
def test_a_mistake(tmp_path: Path, machines: str, sentence: str) -> None:
    """With its line, what is wanted, and what may have been meant; also for a job system that is not used."""
    file = write_config(tmp_path, f"machines: {{{machines}}}\n")
    with pytest.raises(ConfigError) as e:
        read_source(file)
    assert str(e.value).startswith(f"{file}: {sentence}")


def test_options_of_several(tmp_path: Path) -> None:
    """A config may hold those of each, and --set changes one key."""
    file = write_config(tmp_path, "machines: {on: slurm, time: 2h, slurm: {partition: a}, mpi: {hosts: [b]}}\n")
    machines = read_source(file, ["machines.slurm.account=me"]).config.machines
    assert machines is not None
    wanted: dict[str, Any] = {"slurm": {"partition": "a", "account": "me"}, "mpi": {"hosts": ["b"]}}
    assert (machines.time, machines.ranks_per_node, dict(machines.options)) == (7200.0, "auto", wanted)


def test_ranks_get_them(tmp_path: Path) -> None:
    """The config that is written for the ranks is read back as it was."""
    config = read_source(write_config(tmp_path, "machines: {nodes: 2, ray: {mount_path: /x}}\n")).config
    assert Config.model_validate_json(config.json_for_ranks()).machines == config.machines
