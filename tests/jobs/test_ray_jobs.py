"""Ray: what is written for it, without Ray; a cluster is in an environment of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from tests.support.submissions import submission, write_config
from unipar.errors import Unsupported
from unipar.jobs.submission import Submission


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keywords(made: Submission) -> dict[str, object]:
    """The arguments in the program, by name; it is Python."""
    (program,) = (text for name, text in made.texts.items() if name.endswith(".py"))
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    found = {k.arg: k.value for call in calls for k in call.keywords}
    return {str(name): value.value for name, value in found.items() if isinstance(value, ast.Constant)}


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (
            ["machines.nodes=2", "machines.ranks_per_node=1"],
            {"num_workers": 2, "use_gpu": False, "backend": "gloo", "placement_strategy": "STRICT_SPREAD"},
        ),
        (
            ["machines.nodes=2", "machines.ranks_per_node=4", "device=cuda"],
            {"num_workers": 8, "use_gpu": True, "backend": "nccl", "placement_strategy": "PACK", "max_failures": 0},
        ),
        (
            ["machines.ranks_per_node=2", "launch.restarts=3", "checkpoint.every=5"],
            {"num_workers": 2, "max_failures": 3, "storage_path": None, "name": "x"},
        ),
    ],
)
def test_its_trainer(here: Path, sets: list[str], wanted: dict[str, object]) -> None:
    """Workers are ranks; `launch.restarts` is Ray's max_failures."""
    made = submission(write_config(here), "ray", sets)
    assert wanted.items() <= keywords(made).items()
    assert ("resume=auto" in "".join(made.texts.values())) == ("launch.restarts=3" in sets)


def test_its_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory without the runs, the program beside it; with secrets all of it goes through a pipe."""
    monkeypatch.setenv("HF_TOKEN", "hidden")
    sets = ["machines.ranks_per_node=2", "machines.ray.address=http://head:8265"]
    made = submission(write_config(here), "ray", sets)
    folder = here / "runs/x/submit/1"
    plain = {"working_dir": str(here), "excludes": ["/runs/"], "py_modules": [f"{folder}/unipar_ray_job"]}
    assert yaml.safe_load(made.texts["runtime_env.yaml"]) == plain
    assert made.command == [
        *("ray", "job", "submit", "--address", "http://head:8265", "--no-wait"),
        *("--runtime-env", f"{folder}/runtime_env.yaml", "--", "python", "-m", "unipar_ray_job"),
    ]
    assert made.system.hand_over_input(made.job) is None
    secret = submission(write_config(here), "ray", [*sets, "machines.ray.secrets=[HF_TOKEN]"])
    assert secret.command[7] == "/dev/stdin"
    given = secret.system.hand_over_input(secret.job)
    assert given is not None
    assert yaml.safe_load(given) == {**plain, "env_vars": {"HF_TOKEN": "hidden"}}
    assert yaml.safe_load(secret.texts["runtime_env.yaml"]) == plain


def test_what_is_refused(here: Path) -> None:
    """What Ray cannot do, with the key that can, and a restart that would not find its checkpoints."""
    (here / "below").mkdir()
    file = write_config(here, "machines: {nodes: 2, ranks_per_node: 1, time: 2h, setup: [module load CUDA]}\n")
    with pytest.raises(Unsupported) as e:
        submission(file, "ray", ["launch.restarts=1", "checkpoint.every=5"])
    assert str(e.value).splitlines() == [
        "machines.on: ray cannot run this config:",
        "  - machines.time: Ray ends no job by time; set launch.deadline, which saves and stops, instead",
        "  - machines.setup: Ray starts ranks without a shell; put these lines where the cluster is started",
        "  - launch.restarts: 1, and a restart may be on other machines than its checkpoints in ~/unipar-runs: let all "
        "machines see that folder, and say so (machines.folder: shared), or set checkpoint.to",
    ]
