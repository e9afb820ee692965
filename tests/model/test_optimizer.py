"""Groups by name, rates that keep their ratio, and a schedule counted in optimizer steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from typing_extensions import override

import unipar
from unipar.backend.export import groups_code
from unipar.config import Config
from unipar.config.sections.schedule import Constant, Cosine, Linear
from unipar.engines.learning_rate import BaseRates
from unipar.errors import TaskError
from unipar.model.parameter_groups import OptimizerFactory, ParameterGroup, parameter_groups

CPU = torch.device("cpu")
Groups = Callable[[Any], Any]


class _Task(unipar.Task):
    def __init__(self, groups: Groups | None = None) -> None:
        self._groups = groups

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))

    @override
    def data(self) -> Any:
        return None

    @override
    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch).mean()

    @override
    def groups(self, model: nn.Module) -> Any:
        return self._groups(model) if self._groups else None


def _config(**train: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8}, "train": {"steps": 10} | train})


def _of(task: unipar.Task, module: nn.Module, config: Config) -> tuple[ParameterGroup, ...]:
    return parameter_groups(module, config, task.groups(module), own_optimizer=task.defines("optimizer"))


def _made(task: unipar.Task, module: nn.Module, config: Config) -> torch.optim.Optimizer:
    own = task.optimizer if task.defines("optimizer") else None
    return OptimizerFactory(_of(task, module, config), config, CPU, own)(module)


def _groups(made: Groups, **train: Any) -> tuple[ParameterGroup, ...]:
    task = _Task(made)
    return _of(task, task.model(), _config(**train))


def test_matrices_alone_decay() -> None:
    """`decay: matrices` leaves biases and norms out."""
    task = _Task()
    wide, thin = _of(task, task.model(), _config(optimizer={"decay": "matrices"}))
    assert wide.names == ("0.weight", "2.weight")
    assert thin.names == ("0.bias", "1.weight", "1.bias", "2.bias")
    assert dict(thin.settings) == {"weight_decay": 0.0}


class _Norms(nn.Module):
    """Parameters of which no two are alike to the rule of transformers' Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_bias = nn.Embedding(3, 2)
        self.ln_1 = nn.LayerNorm(2)
        self.bn = nn.BatchNorm1d(2)
        self.norm = nn.BatchNorm1d(2)
        self.final_norm = nn.RMSNorm(2)
        self.normal = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


DECAYED = ("scale", "bn.weight", "normal.weight")


def test_what_transformers_decays() -> None:
    """`decay: transformers` goes by names and by LayerNorm, whatever the number of dimensions."""
    decayed, rest = parameter_groups(_Norms(), _config(optimizer={"decay": "transformers"}), None, own_optimizer=False)
    assert (decayed.names, dict(decayed.settings)) == (DECAYED, {})
    assert (len(rest.names), dict(rest.settings)) == (8, {"weight_decay": 0.0})


@pytest.mark.parametrize("decay", ["matrices", "transformers"])
def test_an_exported_script_has_the_same_groups(decay: str) -> None:
    """The statements of a script, run, divide the parameters as the run does."""
    from types import SimpleNamespace

    model, wanted = _Norms(), _config(optimizer={"decay": decay})
    names: dict[str, Any] = {"model": model, "nn": nn, "Any": Any}
    exec(inspect.cleandoc("\n" + groups_code(cast("Any", SimpleNamespace(config=wanted, gives=())))), names)
    of_parameter = {id(p): name for name, p in model.named_parameters()}
    made = parameter_groups(model, wanted, None, own_optimizer=False)
    assert [tuple(of_parameter[id(p)] for p in group["params"]) for group in names["groups"]] == [g.names for g in made]


def test_groups_keep_their_ratio() -> None:
    """The rate of a group, the lr_scale and the schedule's factor are multiplied."""

    def groups(m: Any) -> Any:
        return [{"params": m[0].parameters()}, {"params": [*m[1].parameters(), *m[2].parameters()], "lr": 0.5}]

    task = _Task(groups)
    config = _config(optimizer={"name": "sgd", "lr": 0.1}, lr_scale={"rule": "linear", "base_batch_size": 4})
    module = task.model()
    optimizer = _made(task, module, config)
    rates = BaseRates(optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.0, 0.0]
    rates.set(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5]


def test_a_rate_that_is_a_tensor() -> None:
    """The rate stays the same tensor, which an optimizer of torchao insists on and a compiled update reads."""
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=rate, foreach=False)
    rates = BaseRates(optimizer)
    assert (rates.base, float(rate)) == ([0.5], 0.0)
    rates.set(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.125


WRONG: list[tuple[Groups, str]] = [
    (lambda m: [{"params": [m[0].weight]}],
     "groups() leaves out 0.bias, 1.weight, 1.bias, 2.weight and 1 more: give every trained parameter a group, "
     "or freeze it"),
    (lambda m: [{"params": m.parameters()}, {"params": [m[0].bias]}],
     "groups(): '0.bias' is in two groups; leave it in one"),
    (lambda m: [{"params": [nn.Parameter(torch.ones(1))]}],
     "groups(): group 0 holds a parameter that is not the model's; take parameters from model.parameters()"),
    (lambda m: [{"parameters": m.parameters()}], "groups(): group 0 has no 'params'"),
    (lambda m: [{"params": m.parameters(), "learning_rate": 1.0}],
     "groups(): group 0 sets 'learning_rate'; this optimizer has betas, eps, lr, weight_decay"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "message"), WRONG)
def test_groups_that_are_wrong(made: Groups, message: str) -> None:
    """Wrong groups are refused, most of which PyTorch would accept silently."""
    with pytest.raises(TaskError) as e:
        _groups(made)
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("fused", "foreach", "wanted"),
    [
        ("auto", "auto", (True, None)),
        (False, False, (False, False)),
        (False, "auto", (False, None)),
        ("auto", True, (None, True)),
    ],
)
def test_kernels(fused: Any, foreach: Any, wanted: tuple[Any, Any]) -> None:
    """`fused: auto` uses fused kernels where they exist, unless `foreach` is set."""
    task = _Task()
    config = _config(optimizer={"fused": fused, "foreach": foreach})
    module = task.model()
    defaults = _made(task, module, config).defaults
    assert (defaults["fused"], defaults["foreach"]) == wanted


@pytest.mark.parametrize(
    ("name", "foreach", "device", "split", "wanted"),
    [
        ("adamw", "auto", "cuda", True, {"fused": True}),
        ("sgd", "auto", "cuda", False, {"fused": True}),
        ("sgd", "auto", "cuda", True, {}),
        ("sgd", False, "cpu", True, {"foreach": False}),
        ("adamw", "auto", "mps", False, {}),
        ("rmsprop", "auto", "cuda", False, {}),
        ("rmsprop", True, "cpu", True, {"foreach": True}),
    ],
)
def test_kernels_of_split_parameters(name: str, foreach: Any, device: str, split: bool, wanted: dict[str, Any]) -> None:
    """PyTorch has no fused SGD for split parameters, and no fused RMSprop; `foreach` is then as in the config."""
    optimizer = _config(optimizer={"name": name, "foreach": foreach}).train.optimizer
    told = optimizer.arguments(device, split=split)
    assert {key: told[key] for key in ("fused", "foreach") if key in told} == wanted


def test_rmsprop() -> None:
    """torch.optim.RMSprop with its own options, whose defaults are PyTorch's; groups may set each of them."""
    plain = _made(_Task(), _Task().model(), _config(optimizer={"name": "rmsprop"}))
    assert isinstance(plain, torch.optim.RMSprop)
    assert plain.defaults == torch.optim.RMSprop([torch.zeros(1)]).defaults
    own = {"lr": 0.1, "weight_decay": 0.3, "alpha": 0.9, "eps": 1e-4, "momentum": 0.5, "centered": True}

    def groups(m: Any) -> Any:
        return [{"params": m[0].parameters(), "alpha": 0.8}, {"params": m[1:].parameters(), "centered": False}]

    task = _Task(groups)
    made = _made(task, task.model(), _config(optimizer={"name": "rmsprop", "foreach": False, **own}))
    assert {key: made.defaults[key] for key in (*own, "foreach")} == own | {"foreach": False}
    assert [(g["alpha"], g["centered"]) for g in made.param_groups] == [(0.8, True), (0.9, False)]


class _Owner(_Task):
    """Task with an optimizer made by a given function."""

    def __init__(self, make: Callable[[Any], Any], groups: Groups | None = None) -> None:
        super().__init__(groups)
        self._make = make

    @override
    def optimizer(self, groups: Any) -> Any:
        return self._make(groups)


def _owned(make: Callable[[Any], Any], groups: Groups | None = None, **train: Any) -> Any:
    task, config = _Owner(make, groups), _config(**train)
    module = task.model()
    return _made(task, module, config)


def test_an_optimizer_of_the_tasks_own() -> None:
    """A task's own optimizer gets parameters, scaled rates, decay, and further keys of the groups."""

    def groups(m: Any) -> Any:
        return [{"params": m[0].parameters(), "nesterov": True}, {"params": m[1:].parameters(), "lr": 0.4}]

    scaled = {"rule": "linear", "base_batch_size": 4}
    made = _owned(torch.optim.RMSprop, groups, optimizer={"lr": 0.1, "weight_decay": 0.3}, lr_scale=scaled)
    assert isinstance(made, torch.optim.RMSprop)
    assert [(g["lr"], g["weight_decay"]) for g in made.param_groups] == [(0.2, 0.3), (0.8, 0.3)]
    assert made.param_groups[0]["nesterov"] is True


_STRANGE = nn.Parameter(torch.ones(1))


def _none(groups: Any) -> Any:
    return 3


def _first(groups: Any) -> Any:
    return torch.optim.SGD(groups[:1], lr=1.0)


def _more(groups: Any) -> Any:
    return torch.optim.SGD([*groups, {"params": [_STRANGE]}], lr=1.0)


def _with_closure(groups: Any) -> Any:
    return torch.optim.LBFGS(groups[0]["params"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _with_closure,
            "optimizer() returned LBFGS, whose step() needs a closure, which computes the loss again: a step of unipar "
            "has the gradients of one batch; return an optimizer whose step() does without",
        ),
        (_none, "optimizer() returned 3; it must return a torch.optim.Optimizer over the groups that it is given"),
        (_first, "optimizer() leaves out '0.bias': give it all groups, or freeze the parameter"),
        (_more, "optimizer() holds a parameter that is in none of the groups passed to it; build it from these groups"),
    ],
)
def test_an_optimizer_that_is_none(make: Any, message: str) -> None:
    """A task's own optimizer must cover all groups and nothing else."""
    with pytest.raises(TaskError) as e:
        _owned(make, optimizer={"decay": "matrices"})
    assert str(e.value) == message


@pytest.mark.parametrize(("key", "value", "shown"), [("name", "sgd", "sgd"), ("betas", [0.8, 0.9], "(0.8, 0.9)")])
def test_keys_of_an_optimizer_that_is_not_made(key: str, value: Any, shown: str) -> None:
    """Keys without effect on a task's own optimizer are refused."""
    with pytest.raises(TaskError) as e:
        _owned(torch.optim.RMSprop, optimizer={key: value})
    assert str(e.value) == (
        f"train.optimizer.{key}: {shown} has no effect, as the task makes an optimizer of its own: leave it out; lr, "
        "weight_decay and decay are in the groups that it is given"
    )


def test_decay_of_groups_that_the_task_makes() -> None:
    """train.optimizer.decay says nothing about a task's own groups, and is refused beside them."""
    with pytest.raises(TaskError) as e:
        _owned(torch.optim.SGD, lambda m: [{"params": m.parameters()}], optimizer={"decay": "matrices"})
    assert str(e.value) == (
        "train.optimizer.decay: matrices has no effect beside the task's groups(), which decide on the decay of each: "
        "leave one of them out"
    )


def test_schedules() -> None:
    """Warm-up rises to the full rate; linear and cosine reach `end` at the last of ten steps."""
    cosine, linear = Cosine(warmup=2, min_lr_ratio=0.1), Linear(warmup=2)
    assert [cosine.factor(s, 10) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert cosine.factor(9, 10) == pytest.approx(0.1, abs=1e-15)
    assert [round(linear.factor(s, 10), 6) for s in (2, 3, 9)] == [1.0, 0.857143, 0.0]
    assert [Constant(warmup=4).factor(s, 10) for s in (0, 3, 9)] == [0.25, 1.0, 1.0]


def test_a_schedule_whose_warm_up_is_the_whole_run() -> None:
    """A warm-up as long as the run does not divide by zero."""
    assert [Cosine(warmup=3).factor(s, 3) for s in range(3)] == [
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        1.0,
    ]
