"""Scripts that `unipar export` writes for batches by tokens: the same batches and losses as `unipar run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import FILE, FORGETS, HIDES, WORDS
from tests.support.forks import Forks
from tests.support.traveller import Counted20
from unipar import join
from unipar.config import config_source as source
from unipar.conversion.export import export_script
from unipar.errors import ConfigError

TASK = {"use": f"{FILE}:Counted20", "args": {"width": 16}}
LIMITED: dict[str, Any] = {"tokens": 20, "micro": 6}
"""One, two or three microbatches on each of two ranks, and a part of weight 0 in some."""

EVEN: dict[str, Any] = {"tokens": 20, "accumulate": 2}


def config(batch: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Three epochs, whose numbers of steps differ."""
    train = {**WORDS["train"], "epochs": 3, "lr_scale": {"rule": "linear", "base_batch_size": 10}, "clip": 0.5}
    return {**WORDS, "task": TASK, "batch": batch, "train": train} | changes


def losses_of_one_process(told: dict[str, Any], folder: Path) -> list[float | None]:
    """Return the losses without any library, in this process."""
    alone = {"backend": "single", "parallel": {"data": 1}, "out": str(folder / "alone")}
    with join(told, task=Counted20, overrides=alone, overwrite=True) as run:
        losses = [run.step(local_batch).loss for local_batch in run.batches()]
    assert len(losses) == 11  # 4, 4 and 3
    return losses


def logged_losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("to", "shard", "batch"),
    [
        ("torchrun", "nothing", LIMITED),
        ("torchrun", "parameters", LIMITED | {"rows": "packed"}),
        ("deepspeed", "gradients", LIMITED),
        ("accelerate", "nothing", LIMITED),
        ("deepspeed", "gradients", EVEN),
        pytest.param("accelerate", "nothing", EVEN, marks=pytest.mark.sweep),
        pytest.param("torchrun", "optimizer", EVEN, marks=pytest.mark.sweep),
    ],
)
def test_the_same_losses(to: str, shard: str, batch: dict[str, Any], tmp_path: Path, forks: Forks) -> None:
    """Two ranks of the script, in which unipar cannot be imported, have the losses of one process without a library."""
    told = config(batch)
    expected = losses_of_one_process(told, tmp_path)
    given = source.load_given_config({**told, "parallel": {"data": 2, "shard": shard}})
    made = export_script(given, to, tmp_path / "made")
    (tmp_path / "start.py").write_text(HIDES + FORGETS, encoding="utf-8")
    environment = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    for done in forks.ranks([str(tmp_path / "start.py")], made.folder, environment):
        assert done.returncode == 0, done.stdout + done.stderr
    assert logged_losses(made.folder) == pytest.approx(expected, rel=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("batch", [LIMITED, EVEN])
def test_the_same_losses_under_horovod(batch: dict[str, Any], tmp_path: Path) -> None:
    """Started by its own command, as Horovod's ranks have no variables of torchrun."""
    told = config(batch)
    expected = losses_of_one_process(told, tmp_path)
    made = export_script(source.load_given_config(told), "horovod", tmp_path / "made")
    (tmp_path / "sitecustomize.py").write_text(HIDES, encoding="utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": path, "TMPDIR": str(tmp_path)}
    command = [str(made.folder / "run.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert logged_losses(made.folder) == pytest.approx(expected, rel=2e-6)


def test_what_is_written(tmp_path: Path) -> None:
    """The sizes are constants of train.py, and the division is a file that needs Python alone."""
    made = export_script(source.load_given_config(config(LIMITED)), "torchrun", tmp_path / "made")
    assert made.files == ("README.md", "run.sh", "samples.py", "task.py", "token_split.py", "train.py")
    train = (made.folder / "train.py").read_text("utf-8")
    assert "TOKENS = 20  # in one optimizer step at most, over all ranks and without padding\n" in train
    assert "MICRO = 6  # tokens in one forward pass on one rank at most, with padding\n" in train
    assert "SCALE = 2.0  # of the rate, chosen for 10 tokens a step\n" in train
    words = ("tokens=TOKENS", "micro=MICRO", "accumulate=None", "packed=False", "length=task.length")
    assert "".join(f"        {word},\n" for word in words) in train
    files = {name: (made.folder / name).read_text("utf-8") for name in made.files}
    assert [name for name, text in files.items() if "import unipar" in text or "from unipar" in text] == []
    even = export_script(source.load_given_config(config(EVEN)), "deepspeed", tmp_path / "even").folder
    sizes = json.loads((even / "ds_config.json").read_text("utf-8"))
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [sizes[name] for name in names] == [4, 1, 2]
    assert "ACCUMULATE = 2  # forward passes on one rank in one optimizer step\n" in (even / "train.py").read_text(
        "utf-8"
    )


def test_refused(tmp_path: Path) -> None:
    """Ranks that share the work, and a sample that is too long."""
    split = config(LIMITED, parallel={"data": 1, "tensor": 2})
    with pytest.raises(ConfigError) as caught:
        export_script(source.load_given_config(split), "torchrun", tmp_path / "made")
    assert str(caught.value) == (
        "batch.tokens: 20: a script in which ranks share the work (tensor 2) reads batches of a fixed number of "
        "samples; say how many samples a step has instead, as in --set 'batch={total: 32, micro: 4}'"
    )
    with pytest.raises(ConfigError, match=r"batch\.micro: 4: sample 4 of data\(\) has 5 tokens, more than that"):
        export_script(source.load_given_config(config({"tokens": 20, "micro": 4})), "torchrun", tmp_path / "made")
