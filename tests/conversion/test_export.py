"""Scripts that `unipar export` writes: started by their own command, without unipar, they give unipar's losses."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import FILE, FORGETS, HIDES, WORDS
from tests.support.forks import Forks
from tests.support.traveller import Loaded, Words20
from unipar import Task, join
from unipar.config import config_source as source
from unipar.conversion.export import export_script
from unipar.errors import OutExists, TaskError, UniparError

BIN = Path(sys.executable).parent

PORTS = {"deepspeed": "--master_port", "accelerate": "--main_process_port"}


def alone(config: Mapping[str, Any], task: type[Task], folder: Path, **overrides: Any) -> list[float]:
    """The losses of one process without any library, in this process."""
    told = {**overrides, "backend": "single", "parallel": {"data": 1, "shard": "nothing"}, "out": str(folder / "alone")}
    losses: list[float] = []
    with join({k: v for k, v in config.items() if k != "options"}, task=task, overrides=told, overwrite=True) as run:
        for local_batch in run.batches():
            loss = run.step(local_batch).loss
            assert loss is not None
            losses.append(loss)
    return losses


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which unipar cannot be imported."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDES, encoding="utf-8")
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    made = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(
        [sys.executable, "-c", "import unipar"], env=made, capture_output=True, text=True, check=False
    )
    assert "unipar is hidden" in done.stderr
    return made


def started(folder: Path, to: str, env: dict[str, str], tmp: Path) -> list[dict[str, float]]:
    """Return the rows that run.sh logged."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        words = [PORTS[to], str(free.getsockname()[1])] if to in PORTS else []
    command = [str(folder / "run.sh"), *words]
    env = {**env, "TMPDIR": str(tmp)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return alone(WORDS, Words20, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("to", "shard"),
    [
        *(pytest.param("torchrun", shard, marks=pytest.mark.sweep) for shard in ("nothing", "optimizer", "parameters")),
        pytest.param("deepspeed", "gradients", marks=pytest.mark.sweep),
        pytest.param("accelerate", "nothing", marks=pytest.mark.sweep),
        ("horovod", "nothing"),
    ],
)
def test_the_same_losses(to: str, shard: str, tmp_path: Path, hidden: dict[str, str], expected: list[float]) -> None:
    """Started by the command that came with it, in a world where unipar cannot be imported."""
    told = source.load_given_config({**WORDS, "parallel": {"data": 2, "shard": shard}})
    made = export_script(told, to, tmp_path / "made")
    _compare(started(made.folder, to, hidden, tmp_path), expected)


@pytest.mark.parametrize(
    ("to", "shard"),
    [("torchrun", "nothing"), ("torchrun", "parameters"), ("deepspeed", "gradients"), ("accelerate", "nothing")],
)
def test_the_same_losses_without_a_launcher(
    to: str, shard: str, tmp_path: Path, expected: list[float], forks: Forks
) -> None:
    """Two ranks of the script by hand, with the variables that launchers set; unipar cannot be imported there."""
    told = source.load_given_config({**WORDS, "parallel": {"data": 2, "shard": shard}})
    made = export_script(told, to, tmp_path / "made")
    (tmp_path / "start.py").write_text(HIDES + FORGETS, encoding="utf-8")
    for done in forks.ranks(
        [str(tmp_path / "start.py")], made.folder, {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    ):
        assert done.returncode == 0, done.stdout + done.stderr
    _compare([json.loads(line) for line in (made.folder / "log.jsonl").read_text("utf-8").splitlines()], expected)


def _compare(rows: list[dict[str, float]], expected: list[float]) -> None:
    assert len(expected) == 6
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=2e-6)
    factors = [0.5, 1.0, 1.0, 0.7750000000000001, 0.32500000000000007, 0.1]
    assert [row["lr"] for row in rows] == pytest.approx([0.1 * f for f in factors])


def written(tmp_path: Path, to: str, config: Mapping[str, Any], **more: Any) -> Path:
    return export_script(source.load_given_config(config), to, tmp_path / "made", **more).folder


@pytest.mark.parametrize("to", ["torchrun", "deepspeed", "accelerate", "horovod"])
def test_a_script_is_clean(to: str, tmp_path: Path) -> None:
    """Linter and formatter have nothing to say about what is written, with everything in it and with the least."""
    least: dict[str, Any] = {
        "task": {"use": f"{FILE}:Line"},
        "device": "cpu",
        "parallel": {"data": 1},
        "batch": {"total": 4},
        "train": {"steps": 3},
    }
    made = [written(tmp_path / "full", to, WORDS), written(tmp_path / "least", to, least)]
    loaded = least | {"task": {"use": f"{FILE}:Loaded"}, "device": "cuda"}
    made.append(written(tmp_path / "loaded", to, loaded))
    counted = {"task": {"use": f"{FILE}:Counted20"}, "batch": {"tokens": 20, "micro": 8}}
    made.append(written(tmp_path / "counted", to, WORDS | counted))
    rules = {"optimizer": {"decay": "transformers"}, "schedule": {"name": "linear", "timing": "transformers"}}
    made.append(written(tmp_path / "rules", to, least | {"train": least["train"] | rules}))
    checks = [
        ["check", "--isolated", "--select", "E,F,I,UP,B,RUF", "--ignore", "B905", "--line-length", "120"],
        ["format", "--isolated", "--line-length", "120", "--check"],
    ]
    for folder in made:
        for words in checks:
            command = [
                str(BIN / "ruff"),
                *words,
                *(file.name for file in folder.glob("*.py") if file.name != "task.py"),
            ]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("to", "change", "sentence"),
    [
        (
            "fairscale",
            {},
            "--to fairscale: unknown target; known: accelerate, deepspeed, horovod, torchrun",
        ),
        (
            "torchrun",
            {"train.clip": {"max": 0.5, "norm": "fp64"}},
            "native/nothing: train.clip.norm: fp64 exists in unipar only; a script clips by the fp32 norm "
            "(--set train.clip=0.5)",
        ),
        (
            "horovod",
            {"train.precision": "fp16", "device": "cuda"},
            "horovod/nothing: train.precision: fp16 comes with a loss scale, which a script does not carry; use "
            "bf16-mixed",
        ),
        (
            "torchrun",
            {"parallel.shard": "parameters", "parallel.shard_over": 2},
            "native/parameters: parallel.shard_over: a script does not carry it; leave it out "
            "(--set parallel.shard_over=null)",
        ),
        *(
            (
                "torchrun",
                {"train.ema": ema},
                "native/nothing: train.ema: a script does not carry it; leave it out (--set train.ema=null)",
            )
            for ema in ({}, {"decay": 0.5})
        ),
        (
            "horovod",
            {"parallel.shard": "parameters"},
            "horovod/parameters: parallel.shard: parameters is not available; horovod has nothing",
        ),
        (
            "accelerate",
            {"parallel.shard": "parameters"},
            "accelerate/parameters: scripts for Accelerate over FSDP2 or DeepSpeed are not supported; export to those "
            "directly: --to torchrun (FSDP2), or --to deepspeed (ZeRO)",
        ),
        (
            "deepspeed",
            {"train.precision": "bf16-master"},
            "deepspeed/nothing: train.precision: bf16-master without sharding takes a step of its own while DeepSpeed "
            "starts, which a plain script cannot undo; shard something: --set parallel.shard=optimizer",
        ),
        (
            "deepspeed",
            {"parallel.shard": "gradients", "options": {"deepspeed": {"contiguous": False}}, "backend": "deepspeed"},
            "deepspeed/gradients: options.deepspeed.contiguous: a script does not carry it; leave it out",
        ),
        (
            "torchrun",
            {"device": "cuda:0"},
            "native/nothing: device: cuda:0, one GPU for several ranks, exists in unipar only; say device: cuda",
        ),
        (
            "torchrun",
            {"device": "xpu"},
            "native/nothing: device: xpu: scripts are written for the CPU and for CUDA; say device: cuda",
        ),
        (
            "accelerate",
            {"options": {"accelerate": {"find_unused_parameters": True}}},
            "accelerate/nothing: options.accelerate.find_unused_parameters: true is not carried into a script; "
            "leave it out",
        ),
        (
            "deepspeed",
            {"train.precision": "fp64"},
            "deepspeed/nothing: train.precision: a ds_config.json has no key for fp64; use fp32",
        ),
        (
            "torchrun",
            {"task": None},
            "the config: there is no task.use; export needs the class: task: {use: file.py:Class}",
        ),
        (
            "torchrun",
            {"train.optimizer": {"name": "muon"}},
            "train.optimizer.name: muon is unipar's own optimizer, which joins each matrix on one rank, and a script "
            "has torch.optim's: export with adamw, and create yours in train.py",
        ),
        (
            "torchrun",
            {"train.optimizer": {"name": "adamw-8bit"}},
            "train.optimizer.name: adamw-8bit runs torchao's update without compiling it, and keeps moments in blocks "
            "that fit every world, which a script's torchao.optim.AdamW8bit does not: export with adamw, and create "
            "yours in train.py",
        ),
        (
            "torchrun",
            {"train.optimizer": {"name": "adamw-bf16"}},
            "train.optimizer.name: adamw-bf16 is unipar's own optimizer, whose roundings are the same on every rank, "
            "and a script has torch.optim's: export with adamw, and create yours in train.py",
        ),
    ],
)
def test_refused(to: str, change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Key by key, with the way out, and nothing is written."""
    with pytest.raises(UniparError) as e:
        export_script(source.load_given_config(WORDS, change), to, tmp_path / "made")
    assert str(e.value) == sentence
    assert list(tmp_path.iterdir()) == []


TASKS = """import unipar
from torch import nn
from tests.support.traveller import Line


class Whole(unipar.Task):
    def model(self):
        return nn.Linear(4, 1)

    def data(self):
        return [0.0] * 8

    def loss(self, model, batch):
        return model(batch).mean()


class Own(Whole):
    def train(self, run):
        pass


class Owner(Whole):
    def optimizer(self, groups):
        return None


class Several(Own):
    def model(self):
        return {"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)}


class Derived(Line):
    pass
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "Own",
            "tasks.py:Own: train() is a loop over unipar's Run, which does not exist in a script: export a task "
            "without train(), and write the loop into train.py",
        ),
        (
            "Owner",
            "tasks.py:Owner: optimizer() creates the task's own optimizer, but a script creates the config's: export a "
            "task without optimizer(), and create yours in train.py",
        ),
        (
            "Several",
            "tasks.py:Several: model() returned several parts (a, b), and a script trains one module: export a task "
            "whose model() returns one of them",
        ),
        (
            "Derived",
            f"Derived derives from Line in {FILE}, which a script cannot include: write the code that it needs into "
            "tasks.py",
        ),
    ],
)
def test_a_task_that_no_script_takes(name: str, sentence: str, tmp_path: Path) -> None:
    """Tasks are refused for reasons that only their own code shows."""
    (tmp_path / "tasks.py").write_text(TASKS, encoding="utf-8")
    told = WORDS | {"task": {"use": f"{tmp_path}/tasks.py:{name}"}}
    with pytest.raises(TaskError) as e:
        export_script(source.load_given_config(told), "torchrun", tmp_path / "made")
    assert str(e.value).removeprefix(f"{tmp_path}/") == sentence
    assert not (tmp_path / "made").exists()


def test_what_a_dataloader_says(tmp_path: Path, hidden: dict[str, str]) -> None:
    """Data workers start in the script as in unipar (here they scale samples); without workers nothing is written."""
    told = {**WORDS, "task": {"use": f"{FILE}:Loaded"}, "parallel": {"data": 1}}
    folder = written(tmp_path, "torchrun", told)
    said = "worker_init_fn=data.worker_init_fn, timeout=data.timeout, prefetch_factor=data.prefetch_factor"
    assert said in re.sub(r",\s+", ", ", (folder / "train.py").read_text("utf-8"))
    rows = started(folder, "torchrun", hidden, tmp_path)
    assert [row["loss"] for row in rows] == pytest.approx(alone(told, Loaded, tmp_path), rel=2e-6)
    written(tmp_path, "torchrun", {**told, "data": {"workers": 0}}, overwrite=True)
    assert "data.worker_init_fn" not in (folder / "train.py").read_text("utf-8")


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    """An export is replaced when asked; a folder of somebody else's never."""
    folder = written(tmp_path, "torchrun", WORDS)
    (folder / "log.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(OutExists) as e:
        written(tmp_path, "torchrun", WORDS)
    way = "name another folder (--out DIR), or write over it (--overwrite)"
    assert str(e.value) == f"--out: {folder} already exists; {way}"
    written(tmp_path, "torchrun", WORDS, overwrite=True)
    assert sorted(os.listdir(folder)) == ["README.md", "run.sh", "samples.py", "task.py", "train.py"]
    (folder / "README.md").write_text("mine", encoding="utf-8")
    with pytest.raises(OutExists) as e:
        written(tmp_path, "torchrun", WORDS, overwrite=True)
    assert str(e.value) == (
        f"--out: {folder} was not written by `unipar export`, so it is not overwritten; name another folder"
    )
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("to", ["torchrun", "deepspeed", "accelerate", "horovod"])
def test_the_shipped_config(to: str, tmp_path: Path) -> None:
    """The one that the docs export: what a script leaves out is listed, and nothing of it is refused."""
    shipped = source.load_config_file(Path(__file__).parents[2] / "configs" / "char_gpt.yaml")
    result = export_script(shipped, to, tmp_path / "script")
    assert result.left_out == (
        "eval: the script trains, and does not evaluate",
        "checkpoint: the script does not save its state",
    )
