"""Recipes trained by transformers' Trainer itself, and by unipar from the import of their arguments: equal steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from typing_extensions import override

from tests.support.running import running
from tests.support.trainer_recipes import READ_IN_ORDER, RECIPES, Recipe, Samples, Trained, model_of
from unipar.conversion.import_config import import_library_config
from unipar.run_folder.ledger import Ledger
from unipar.run_folder.layout import ledger_path


class _Recording(Trainer):
    """The Trainer, which notes the sum of each step's losses, before logs round it."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.sum = torch.zeros((), dtype=torch.float64)

    @override
    def training_step(self, *args: Any, **words: Any) -> torch.Tensor:
        loss = super().training_step(*args, **words)
        self.sum += loss
        return loss


class _EachStep(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None

    @override
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **words: Any) -> None:
        self.trainer.losses.append(float(self.trainer.sum))
        self.trainer.rates.append(float(self.trainer.optimizer.param_groups[0]["lr"]))
        self.trainer.sum.zero_()


def by_trainer(recipe: Recipe, folder: Path) -> tuple[_Recording, TrainingArguments]:
    arguments = TrainingArguments(output_dir=str(folder / "out"), save_strategy="no", report_to=[], disable_tqdm=True,
        **READ_IN_ORDER, **recipe.arguments)
    steps = _EachStep()
    steps.trainer = _Recording(
        model=model_of(recipe), args=arguments, train_dataset=Samples(recipe.sample, recipe.size), callbacks=[steps]
    )
    steps.trainer.train()
    return steps.trainer, arguments


@pytest.mark.parametrize("name", RECIPES)
def test_each_step(name: str, tmp_path: Path) -> None:
    """Losses, rates and norms of gradients are the Trainer's to six digits."""
    theirs, arguments = by_trainer(RECIPES[name], tmp_path)
    file = tmp_path / "training_args.json"
    file.write_text(arguments.to_json_string(), encoding="utf-8")
    made = import_library_config(file, ("backend=single",))
    print(made.text, made.assumed)
    sections = made.config.model_dump(exclude_unset=True)
    (tmp_path / "run").mkdir()
    with running(Trained(name), tmp_path / "run", **sections) as run:
        run.task.train(run)
    rows = [row for row in Ledger.read(ledger_path(tmp_path / "run", 0)) if row["event"] == "step"]
    norms = [row["grad_norm"] for row in theirs.state.log_history if "grad_norm" in row]
    print(rows[0])
    print([row["lr"] for row in rows], theirs.rates)
    print([row["loss"] for row in rows], theirs.losses)
    print([row.get("norm") for row in rows], norms)
    assert [row["lr"] for row in rows] == pytest.approx(theirs.rates, rel=1e-9)
    assert [row["loss"] for row in rows] == pytest.approx(theirs.losses, rel=1e-6)
