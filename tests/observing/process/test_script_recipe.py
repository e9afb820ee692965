"""What is noted of how a script makes model, data, optimizer and loss."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    TensorDataset,
    dataloader,
)

from unipar.observing.libraries import known_libraries
from unipar.observing.process.patches import Patches
from unipar.observing.process.script_recipe import ScriptRecipe
from unipar.observing.process.script_state import ScriptState
from unipar.results.observed_recipe import Recipe


class Net(nn.Module):
    """A model whose weights decay in part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.table = nn.Parameter(torch.zeros(width, width))
        self.out = nn.Linear(width, 1)


def pad(samples: list[Any]) -> Any:
    """Return a batch."""
    return torch.stack([sample[0] for sample in samples])


POINTS = TensorDataset(torch.randn(16, 4))


class _Noted:
    """A script's parts, with a recipe that notes them as the observer does."""

    def __init__(self) -> None:
        self.state = ScriptState(known_libraries())
        self.recipe = ScriptRecipe(self.state)
        self.patches = Patches()
        around = self.patches.around
        around(nn.Module, "__init__", before=self._module_made)
        around(Optimizer, "__init__", after=self._optimizer_made)
        around(torch.autocast, "__enter__", before=self.recipe.autocast_entered)
        around(DataLoader, "__iter__", before=self.recipe.epoch_begun)
        around(dataloader._BaseDataLoaderIter, "__next__", after=self.recipe.batch_read)  # pyright: ignore[reportPrivateUsage]

    def _module_made(self, module: nn.Module, *_: Any, **__: Any) -> None:
        self.recipe.module_made(module)

    def _optimizer_made(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        self.recipe.optimizer_made(optimizer)

    def describe(self, optimizer: Optimizer) -> Recipe:
        """Return what was noted when the optimizer takes its first step."""
        self.state.add(optimizer)
        self.recipe.describe()
        made = self.recipe.made
        assert made is not None
        return Recipe.model_validate_json(made.model_dump_json())


@pytest.fixture
def noted() -> Generator[_Noted]:
    """Note what the test makes, as if it were a script."""
    noted = _Noted()
    yield noted
    noted.patches.undo()


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_model_and_seed(noted: _Noted) -> None:
    """The model has the arguments and the line of its constructor, and PyTorch's seed at that time."""
    torch.manual_seed(5)
    model = Net(width=4)
    torch.manual_seed(6)
    recipe = noted.describe(_sgd(model))
    assert recipe.model is not None
    assert (recipe.model.expression, recipe.model.imports) == ("Net(width=4)", {"Net": __name__})
    assert recipe.model.made is not None
    assert recipe.model.made.function == "test_model_and_seed"
    assert recipe.seed == 5


def test_drawn_seed(noted: _Noted) -> None:
    """A seed that PyTorch has drawn is none."""
    torch.seed()
    assert noted.describe(_sgd(Net(4))).seed is None


def test_frozen_and_recomputed(noted: _Noted) -> None:
    """Weights that do not train, and models that compute activations again, are noted."""
    model = Net(4)
    model.table.requires_grad_(False)
    model.gradient_checkpointing = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    recipe = noted.describe(_sgd(model))
    assert (recipe.frozen, recipe.recompute, recipe.compiled) == (16, True, "")


def test_compiled(noted: _Noted) -> None:
    """A compiled model is told from compiled blocks; its own class is that of the user."""
    model = Net(4)
    compiled: Any = torch.compile(model, backend="eager")
    recipe = noted.describe(_sgd(compiled))
    assert recipe.model is not None
    assert (recipe.model.name, recipe.compiled, recipe.wrappers) == ("Net", "model", ())


def test_compiled_block(noted: _Noted) -> None:
    """A compiled part of a model is a block."""
    model = Net(4)
    model.out.compile(backend="eager")
    assert noted.describe(_sgd(model)).compiled == "blocks"


@pytest.mark.parametrize("rule", ["all", "matrices", "transformers", "own"])
def test_decay(noted: _Noted, rule: str) -> None:
    """The weights that decay are compared with unipar's rules."""
    model = Net(4)
    named = dict(model.named_parameters())
    undecayed = {
        "all": [],
        "matrices": ["norm.weight", "norm.bias", "out.bias"],
        "transformers": ["norm.weight", "norm.bias", "out.bias"],
        "own": ["out.weight"],
    }[rule]
    if rule == "transformers":
        model.scale = nn.Parameter(torch.ones(4))  # one dimension, and no norm by its name
        named["scale"] = model.scale
    groups = [
        {"params": [p for name, p in named.items() if name not in undecayed]},
        {"params": [p for name, p in named.items() if name in undecayed], "weight_decay": 0.0},
    ]
    seen = noted.describe(torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3)).optimizers[0]
    assert (seen.name, seen.decay, seen.settings["betas"]) == ("AdamW", rule, [0.9, 0.999])


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not seen"])
def test_base_rate(noted: _Noted, *, seen: bool) -> None:
    """The rate is that with which the optimizer was made, whatever a schedule has made of it."""
    model = Net(4)
    if not seen:
        noted.patches.undo()
    optimizer = _sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    noted.recipe.schedule_stepped(schedule)
    recipe = noted.describe(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert recipe.optimizers[0].settings["lr"] == 0.1
    assert (recipe.schedules[0].name, recipe.schedules[0].numbers["base_lr"]) == ("LambdaLR", 0.1)


@pytest.mark.parametrize(
    ("loader", "shuffle"),
    [
        (lambda: DataLoader(POINTS, batch_size=4), False),
        (lambda: DataLoader(POINTS, batch_size=4, shuffle=True), True),
        (lambda: DataLoader(POINTS, batch_size=4, sampler=DistributedSampler(POINTS, 2, 0)), True),
        (lambda: DataLoader(POINTS, batch_size=4, sampler=DistributedSampler(POINTS, 2, 0, shuffle=False)), False),
        (lambda: DataLoader(POINTS, batch_sampler=BatchSampler(RandomSampler(POINTS), 4, drop_last=False)), True),
        (lambda: DataLoader(POINTS, batch_size=4, sampler=[3, 1, 2, 0]), None),
    ],
    ids=["in order", "shuffled", "distributed", "distributed in order", "batch sampler", "own"],
)
def test_loader(noted: _Noted, loader: Any, shuffle: bool | None) -> None:
    """Batch size and order come from the loader whose batches train, even if the script does not keep it."""
    model = Net(4)
    for _ in loader():
        break
    with torch.no_grad():
        next(iter(DataLoader(TensorDataset(torch.zeros(2)))))
    seen = noted.describe(_sgd(model)).loader
    assert seen is not None
    assert (seen.dataset.name, seen.batch_size, seen.shuffle, seen.samples) == ("TensorDataset", 4, shuffle, 16)


def test_part_of_a_dataset(noted: _Noted) -> None:
    """What is around the dataset, what makes batches, and the variable that holds the dataset are noted."""
    dataset = TensorDataset(torch.zeros(8, 1))
    for _ in DataLoader(Subset(dataset, range(4)), batch_size=2, collate_fn=pad, drop_last=True):
        pass
    seen = noted.describe(_sgd(Net(4))).loader
    assert seen is not None
    assert seen.collate is not None
    assert (seen.wrapped_in, seen.dataset.variable, seen.collate.expression) == (("Subset",), "dataset", "pad")
    assert seen.drop_last


def test_autocast(noted: _Noted) -> None:
    """The dtype of an autocast counts if it is enabled and gradients are recorded."""
    model = Net(4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        pass
    assert noted.recipe.made is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    assert noted.describe(_sgd(model)).autocast == "bfloat16"


def test_loss_line(noted: _Noted) -> None:
    """The line that calls backward is noted, with the variables there that hold the model and another one."""
    model, critic = Net(4), nn.Linear(1, 1)
    noted.recipe.backward_called()
    loss = noted.describe(_sgd(model)).loss
    assert loss is not None
    assert (loss.place.file, loss.place.function) == (__file__, "test_loss_line")
    assert (loss.models, loss.others) == (("model",), ("critic",))
    assert critic.in_features == 1
