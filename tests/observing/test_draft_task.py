"""The draft of a task and its config: exact texts from what was seen, and one real script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import typer

from tests.support.launchers import environment
from unipar.backend.checks import read_source
from unipar.cli.commands.observe import observe
from unipar.errors import OutExists, ReportError
from unipar.observing.draft_task import write_draft
from unipar.results.observed_rank import ObservedRank, observed_rank_path
from unipar.results.observed_recipe import CodePlace, Recipe, SeenLoader, SeenLoss, SeenObject, SeenOptimizer
from unipar.task.reference import TaskRef

SCRIPT = dedent(
    """
    import torch
    from torch.nn import functional as F
    from mine import Net, points
    model = Net(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    dataset = points()
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    """
)

MODULE = """\
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.line(x)

def points():
    return torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
"""

TASK = '''\
"""First draft of a task, made by `unipar observe --to task` from what was seen of train.py.

`guess:` marks what may be wrong, `to do:` what was not seen; everything else was seen.
"""

import sys
from pathlib import Path

sys.path.append(str((Path(__file__).parent / '..').resolve()))  # modules of train.py

import unipar
from mine import Net, points
from torch.nn import functional as F


class NetTask(unipar.Task):
    def model(self):
        # mine.Net, 9 parameters, made in line 5 of train.py
        return Net(width=8)

    def data(self):
        # torch.utils.data.dataset.TensorDataset, 64 samples
        # guess: line 7 of train.py
        return points()

    def loss(self, model, batch):
        # guess: lines 10 to 11 of train.py
        x, y = batch
        return F.mse_loss(model(x), y)
'''

CONFIG = """\
# yaml-language-server: $schema=unipar.schema.json
# First draft for train.py, made by `unipar observe --to task` from what was seen of a run.
# A value without a remark was seen. `guess:` marks what may be wrong, `to do:` what was not seen.

task:
  use: "task.py:NetTask"
backend: native                                 # the script has DDP
device: cpu
parallel:
  data: 2
  shard: nothing
batch:
  micro: 4
  accumulate: 1
data:
  shuffle: true
train:
  steps: 8                                      # guess: steps that were taken
  optimizer:
    name: adamw
    lr: 0.0003
    weight_decay: 0.01
  schedule:
    name: constant
  clip: 1.0
  precision: fp32
  seed: 7
"""


def _recipe(folder: Path, **changes: Any) -> Recipe:
    script, module = folder / "train.py", folder / "mine.py"
    script.write_text(SCRIPT, encoding="utf-8")
    module.write_text(MODULE, encoding="utf-8")
    net = SeenObject(
        name="Net",
        module="mine",
        file=str(module),
        expression="Net(width=8)",
        imports={"Net": "mine"},
        files={"mine": str(module)},
        made=CodePlace(file=str(script), line=5),
    )
    dataset = SeenObject(
        name="TensorDataset",
        module="torch.utils.data.dataset",
        made=CodePlace(file=str(script), line=12),
        variable="dataset",
    )
    values: dict[str, Any] = {
        "script": str(script),
        "model": net,
        "wrappers": ("DDP",),
        "optimizers": (_optimizer(),),
        "loader": SeenLoader(dataset=dataset, batch_size=4, shuffle=True, samples=64),
        "loss": SeenLoss(place=CodePlace(file=str(script), line=11), models=("model",)),
        "seed": 7,
    }
    return Recipe(**{**values, **changes})


def _optimizer(**changes: Any) -> SeenOptimizer:
    settings = {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "fused": None}
    values: dict[str, Any] = {"name": "AdamW", "module": "torch.optim.adamw", "settings": settings}
    return SeenOptimizer(**{**values, **changes})


def _rank(recipe: Recipe | None, **changes: Any) -> ObservedRank:
    values: dict[str, Any] = {
        "rank": 0,
        "size": 2,
        "launched_size": 2,
        "parameters": 9,
        "dtypes": {"float32": 9},
        "steps": 8,
        "backwards": (1,) * 8,
        "first_dimension": 4,
        "clip": 1.0,
        "rates": dict.fromkeys(range(1, 9), (3e-4,)),
        "recipe": recipe,
    }
    return ObservedRank(**{**values, **changes})


def _drafted(folder: Path, rank: ObservedRank) -> tuple[str, str, str]:
    """Return task.py, task.yaml and what is printed for a rank."""
    out = folder / "observed"
    out.mkdir(exist_ok=True)
    observed_rank_path(out, 0).write_text(rank.model_dump_json(), encoding="utf-8")
    said = write_draft(out, overwrite=True)
    return (out / "task.py").read_text("utf-8"), (out / "task.yaml").read_text("utf-8"), said


def test_exact_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left to do, the draft is a complete task, and its config passes the checks."""
    monkeypatch.chdir(tmp_path)
    task, config, said = _drafted(tmp_path, _rank(_recipe(tmp_path)))
    assert task == TASK
    assert config == CONFIG
    folder = tmp_path / "observed"
    assert said == (
        f"draft: {folder / 'task.py'} and {folder / 'task.yaml'}\n"
        "read what `guess:` marks, then: unipar verify observed/task.yaml"
    )
    source = read_source(folder / "task.yaml")
    assert source.config.batch.settle(2).total == 8
    TaskRef.of(None, source.config.task, {}).check_code()


def test_draft_is_not_replaced(tmp_path: Path) -> None:
    """A draft, which the user may have changed, is replaced only if asked for."""
    _drafted(tmp_path, _rank(_recipe(tmp_path)))
    with pytest.raises(OutExists, match=r"observed/task\.py exists: give --overwrite to replace the draft"):
        write_draft(tmp_path / "observed")


def test_nothing_to_draft(tmp_path: Path) -> None:
    """A folder without a rank that trains a model says what to do."""
    observed_rank_path(tmp_path, 0).write_text(_rank(None).model_dump_json(), encoding="utf-8")
    with pytest.raises(ReportError, match="holds no rank of a command observed by `unipar observe` that trains"):
        write_draft(tmp_path)


def test_gaps(tmp_path: Path) -> None:
    """What was not seen is a to do, with what to write, and is counted."""
    opaque = SeenObject(name="Net", module="mine", unknown=("config: CfgNode",))
    recipe = _recipe(tmp_path, model=opaque, loader=None, loss=None)
    task, _, said = _drafted(tmp_path, _rank(recipe, first_dimension=None))
    assert "    # to do: make it; not known: config: CfgNode\n        raise NotImplementedError" in task
    assert "# to do: return the dataset; the script has no loader of torch that was seen\n" in task
    assert "# to do: return the mean loss over the batch\n" in task
    assert "`to do:` marks 4 places to fill in, then: unipar verify" in said


def test_loss_of_a_batch_with_labels(tmp_path: Path) -> None:
    """If a library calls backward and the batch has labels, the model returns the loss."""
    loss = SeenLoss(place=CodePlace(file=str(tmp_path / "train.py"), line=9), models=("model",))
    task, _, _ = _drafted(tmp_path, _rank(_recipe(tmp_path, batch_keys=("input_ids", "labels"), loss=loss)))
    assert (
        "    # guess: the batch has labels, so that the model returns the loss\n        return model(**batch).loss"
        in task
    )


def test_own_optimizer_and_groups(tmp_path: Path) -> None:
    """An optimizer that unipar lacks is made by the task, and groups of the script's own are a to do."""
    lion = _optimizer(
        name="Lion",
        module="lion_pytorch",
        settings={"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.99]},
        groups=({}, {"lr": 1e-5}),
        decay="own",
    )
    task, config, _ = _drafted(tmp_path, _rank(_recipe(tmp_path, optimizers=(lion,))))
    assert "from lion_pytorch import Lion\n" in task
    assert "        return Lion(groups, betas=[0.9, 0.99])\n" in task
    assert "        # the script's groups differ from task.yaml by: as in task.yaml; {'lr': 1e-05}\n" in task
    assert "name: adamw                                 # guess: Lion is not among sgd, adam" in config


def test_collate(tmp_path: Path) -> None:
    """A function that makes batches becomes the task's collate."""
    pad = SeenObject(name="pad", module="mine", expression="pad", imports={"pad": "mine"})
    recipe = _recipe(tmp_path)
    assert recipe.loader is not None
    loader = recipe.loader.model_copy(update={"collate": pad})
    task, _, _ = _drafted(tmp_path, _rank(recipe.model_copy(update={"loader": loader})))
    assert "from mine import Net, pad, points\n" in task
    assert "    def collate(self, samples):\n        return pad(samples)\n" in task


def test_real_script(tmp_path: Path) -> None:
    """A script that nobody changed gives a draft that is complete, and whose task gives a loss."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    command = [sys.executable, "-m", "unipar", "observe", "--to", "task", "--", sys.executable, "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"UNIPAR_OBSERVE_RAISE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "read what `guess:` marks, then: unipar verify observed/task.yaml\n" in done.stderr
    folder = tmp_path / "observed"
    assert (folder / "task.py").read_text("utf-8") == TASK
    drawn = "guess: the script gave PyTorch no seed before the model was made"
    assert f"seed: 0                                       # {drawn}\n" in (folder / "task.yaml").read_text("utf-8")
    source = read_source(folder / "task.yaml")
    assert (source.config.train.steps, source.config.batch.micro, source.config.train.optimizer.name) == (
        16,
        4,
        "adamw",
    )
    task = TaskRef.of(None, source.config.task, {}).load()
    samples = [task.data()[i] for i in range(4)]
    model = task.model()
    assert isinstance(model, torch.nn.Module)
    assert task.loss(model, task.collate(samples)).ndim == 0


def test_draft_of_earlier_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from DIR` writes the draft from results, and runs nothing."""
    _drafted(tmp_path, _rank(_recipe(tmp_path)))
    folder = tmp_path / "observed"
    (folder / "task.py").unlink()
    observe(to="task", earlier=folder, overwrite=True)
    assert (folder / "task.py").read_text("utf-8") == TASK
    assert capsys.readouterr().out.startswith(f"draft: {folder / 'task.py'} and {folder / 'task.yaml'}\n")
    with pytest.raises(typer.BadParameter, match="--from DIR reads results and runs nothing"):
        observe(["true"], to="task", earlier=folder)


def test_unknown_target() -> None:
    """There is one thing that a draft can be written for."""
    with pytest.raises(typer.BadParameter, match="--to deepspeed: there is only --to task"):
        observe(["true"], to="deepspeed")
