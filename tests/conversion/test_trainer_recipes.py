"""Recipes trained by transformers' Trainer itself, and by unipar from the import of their arguments: equal steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler
from typing_extensions import override

import unipar
from tests.support.running import running
from tests.support.trainer_recipes import READ_IN_ORDER, RECIPES, Recipe, Samples, Trained, model_of
from tests.support.world import ROOT
from unipar.config.config import Config
from unipar.conversion.import_config import ImportedConfig, import_library_config
from unipar.errors import ConfigError
from unipar.model.parameter_groups import parameter_groups
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own, of their own calls

Rows = list[Mapping[str, Any]]


class _Recording(Trainer):
    """The Trainer, which notes each step's loss and rate, before its log rounds them."""

    def __init__(self, recipe: Recipe, arguments: Any) -> None:
        samples = Samples(recipe.sample, recipe.size)
        super().__init__(model=model_of(recipe), args=arguments, train_dataset=samples, callbacks=[_EachStep(self)])
        self.rows: Rows = []
        self.losses: list[float] = []

    def training_step(self, *args: Any, **words: Any) -> torch.Tensor:
        loss = super().training_step(*args, **words)
        self.losses.append(float(loss))
        return loss


class _EachStep(TrainerCallback):
    def __init__(self, trainer: _Recording) -> None:
        self.trainer: Any = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **words: Any) -> None:
        rate = float(self.trainer.optimizer.param_groups[0]["lr"])
        self.trainer.rows.append({"loss": sum(self.trainer.losses), "lr": rate})
        self.trainer.losses.clear()


def arguments_of(recipe: Recipe, folder: Path, **changes: Any) -> Any:
    own: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder / "out"), **own, **READ_IN_ORDER, **{**recipe.arguments, **changes})


def by_trainer(recipe: Recipe, arguments: Any) -> Rows:
    """Return loss, rate and gradient norm of each step."""
    trainer = _Recording(recipe, arguments)
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return [{**row, "norm": norm} for row, norm in zip(trainer.rows, norms, strict=True)]


def imported(arguments: Any, folder: Path, *sets: str, **more: Any) -> ImportedConfig:
    """Return the import of what `to_json_string()` gives."""
    file = folder / "training_args.json"
    file.write_text(arguments.to_json_string(), encoding="utf-8")
    return import_library_config(file, sets, **more)


def by_unipar(task: unipar.Task, made: ImportedConfig, folder: Path) -> Rows:
    folder.mkdir()
    with running(task, folder, **made.config.model_dump(exclude_unset=True)) as run:
        task.train(run)
    return steps_in(folder)


def steps_in(folder: Path) -> Rows:
    return [row for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == "step"]


def assert_equal_steps(ours: Rows, theirs: Rows) -> None:
    for key, digits in (("lr", 1e-12), ("loss", 1e-6), ("norm", 1e-5)):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=digits), key


PLAYED = ("gpt2", "t5", "resnet")
"""Recipes that `make test` trains; the others train in `make sweeps`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PLAYED else pytest.mark.sweep) for name in RECIPES]
)
def test_each_step(name: str, tmp_path: Path) -> None:
    """Losses, rates and norms of gradients are the Trainer's."""
    recipe = RECIPES[name]
    arguments = arguments_of(recipe, tmp_path)
    theirs = by_trainer(recipe, arguments)
    ours = by_unipar(Trained(name), imported(arguments, tmp_path, "backend=single"), tmp_path / "run")
    assert len(theirs) > 4
    assert_equal_steps(ours, theirs)


@pytest.mark.sweep
def test_two_ranks(tmp_path: Path, forked: None) -> None:
    """Half of the Trainer's batch on each of two ranks gives the steps of its whole batch."""
    recipe = RECIPES["gpt2"]
    theirs = by_trainer(recipe, arguments_of(recipe, tmp_path))
    halves = arguments_of(recipe, tmp_path, per_device_train_batch_size=2)
    made = imported(halves, tmp_path, "parallel.data=2", f"out={tmp_path / 'run'}")
    task = {"use": f"{ROOT}/tests/support/trainer_recipes.py:Trained", "args": {"name": "gpt2"}}
    unipar.launch(made.config.changed({"task": task}), quiet=True)
    assert_equal_steps(steps_in(tmp_path / "run"), theirs)


class _Summed(Trained):
    """The loss as the Trainer has it, of a model that does not divide by what the Trainer tells it."""

    @override
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return 2 * super().loss(model, batch)


@pytest.mark.sweep
def test_a_loss_that_is_not_divided(tmp_path: Path) -> None:
    """The Trainer adds up T5's losses over two microbatches, where a mean is meant, as docs/migrate.md says."""
    recipe = RECIPES["t5"]
    arguments = arguments_of(recipe, tmp_path, gradient_accumulation_steps=2)
    theirs = by_trainer(recipe, arguments)
    made = imported(arguments, tmp_path, "backend=single")
    why = "a mean, where the Trainer adds up the losses of some models, as those of T5 and of BERT's classifiers"
    assert f"# gradient_accumulation_steps; {why}\n" in made.text
    assert_equal_steps(by_unipar(_Summed("t5"), made, tmp_path / "run"), theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_what_decays(name: str) -> None:
    """The two groups are those of the Trainer's optimizer."""
    model = model_of(RECIPES[name])
    theirs = Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]  # it reads no self
    given = {"batch": {"total": 1}, "train": {"steps": 1, "optimizer": {"decay": "transformers"}}}
    groups = parameter_groups(model, Config.model_validate(given), None, own_optimizer=False)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    wanted = [tuple(n for n in trained if (n in theirs) is decays) for decays in (True, False)]
    assert [group.names for group in groups] == [names for names in wanted if names]


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        ("linear", {}), ("cosine", {}), ("constant", {}), ("constant_with_warmup", {}), ("inverse_sqrt", {}),
        ("cosine_with_restarts", {}), ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "linear"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 4])
def test_rates(kind: str, details: dict[str, Any], warmup: int, tmp_path: Path) -> None:
    """Each schedule that is carried has the rates of transformers' own."""
    arguments = TrainingArguments(
        output_dir="out", use_cpu=True, max_steps=20, learning_rate=1e-3, warmup_steps=warmup, lr_scheduler_type=kind,
        lr_scheduler_kwargs=details,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = get_scheduler(kind, optimizer, warmup, 20, scheduler_specific_kwargs=details)
    rates: list[float] = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    train = imported(arguments, tmp_path).config.train
    ours = [train.optimizer.lr * train.schedule.factor(step, 20) for step in range(20)]
    assert ours == pytest.approx(rates, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("dumped", ["to_json_string", "to_dict", "vars"])
def test_defaults_need_no_remark(dumped: str, tmp_path: Path) -> None:
    """A saved TrainingArguments is taken as it is, and its 114 defaults are told in no line."""
    arguments = TrainingArguments(output_dir="out", learning_rate=3e-4)
    kinds: dict[str, Any] = {"to_dict": arguments.to_dict(), "vars": vars(arguments)}
    text = arguments.to_json_string() if dumped not in kinds else json.dumps(kinds[dumped], default=str)
    (tmp_path / "args.json").write_text(text, encoding="utf-8")
    made = import_library_config(tmp_path / "args.json")
    no = "no setting of training in unipar"
    own = [f"{name}: {no}" for name in ("accelerator_config", "mixed_precision", "distributed_state")]
    assert made.left_out == ("output_dir: say out", *(own if dumped == "vars" else ()))
    assert made.assumed == ("backend: 'native'",)
    _, *comments = [line.partition("  # ")[2] for line in made.text.splitlines() if "  # " in line]
    assert comments == [  # behind that beside the task
        "assumed: the file names no library: each rank has a copy of the model, as under torchrun",
        "learning_rate",
        "save_steps; the newest 3 are kept (checkpoint.keep), where the Trainer keeps all",
    ]


def test_no_remark_names_the_same_word(tmp_path: Path) -> None:
    """A value that has no key is refused by its own sentence."""
    arguments = TrainingArguments(output_dir="out", label_smoothing_factor=0.1)
    with pytest.raises(ConfigError) as caught:
        imported(arguments, tmp_path)
    assert "label_smoothing_factor: 0.1 has no key of unipar; leave it out with --leave" in str(caught.value)
    assert "did you mean" not in str(caught.value)
