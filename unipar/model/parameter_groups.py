"""Parameter groups by name, and the optimizer over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unipar.config import Config
from unipar.config.sections.optimizer_settings import OptimizerSettings
from unipar.errors import TaskError
from unipar.model.matrices import matrix_names
from unipar.optimizers.matrix_optimizer import MatrixOptimizer
from unipar.utils.text import first_few

MakeOptimizer = Callable[[Sequence[dict[str, Any]]], Optimizer | None]
"""Function that makes a task's own optimizer over groups: `Task.optimizer`."""


@dataclass(frozen=True)
class ParameterGroup:
    """Names of parameters and the optimizer's settings for them.

    Parameters are named, because libraries replace the parameter objects.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    matrices: frozenset[str] = frozenset()
    """Those among them that an optimizer by whole matrices updates whole."""


def optimizer_class(settings: OptimizerSettings) -> type[Optimizer]:
    """Return the class that updates parameters by these settings. Its module is imported now."""
    module, _, name = settings.implementation.partition(":")
    return getattr(import_module(module), name)


def parameter_groups(
    module: nn.Module, config: Config, task_groups: Iterable[Mapping[str, Any]] | None, *, own_optimizer: bool
) -> tuple[ParameterGroup, ...]:
    """Return the optimizer's groups: those of the task, else of the config.

    They are computed from the model as the user made it, because split parameters lose their shape. Keys of the
    task's groups are checked, except if it makes its own optimizer. Matrices that are updated as a whole get groups of
    their own.
    """
    groups, wanted = _whole_groups(module, config, task_groups, own_optimizer=own_optimizer), config.train.optimizer
    if own_optimizer:
        matrices = matrix_names(module)
        return tuple(replace(group, matrices=matrices & set(group.names)) for group in groups)
    choice = wanted.matrix_choice()
    if choice is None:
        return groups
    matrices = matrix_names(module, choice.patterns, choice.left_out)
    split = tuple(part for group in groups for part in _split_group(group, matrices, choice.rest))
    if not any(group.matrices for group in split):
        raise TaskError(
            f"train.optimizer.name: {wanted.name} finds no matrix to update: of weights of two dimensions, it leaves "
            "embeddings and the last one, the head, to AdamW; name them (train.optimizer.matrices), or take adamw"
        )
    return split


def _split_group(
    group: ParameterGroup, matrices: frozenset[str], of_rest: Mapping[str, float]
) -> Iterator[ParameterGroup]:
    """Yield the matrices of a group, and the rest, with the settings of the rest that the group does not have."""
    settings = dict(group.settings)
    mine = tuple(n for n in group.names if n in matrices and settings.get("matrices", True))
    rest = tuple(n for n in group.names if n not in mine)
    if mine:
        yield ParameterGroup(mine, settings | {"matrices": True}, frozenset(mine))
    if rest:
        yield ParameterGroup(rest, {**of_rest, **settings, "matrices": False})


def _whole_groups(
    module: nn.Module, config: Config, task_groups: Iterable[Mapping[str, Any]] | None, *, own_optimizer: bool
) -> tuple[ParameterGroup, ...]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if task_groups is not None:
        if config.train.optimizer.decay != "all":
            raise TaskError(
                f"train.optimizer.decay: {config.train.optimizer.decay} has no effect beside the task's groups(), "
                "which decide on the decay of each: leave one of them out"
            )
        return _groups_of_task(task_groups, trained, module, config, own=own_optimizer)
    if config.train.optimizer.decay == "all":
        return (ParameterGroup(tuple(trained), {}),)
    if config.train.optimizer.decay == "matrices":
        decayed = {n for n, p in trained.items() if p.ndim > 1}
    else:
        decayed = _names_the_trainer_decays(module)
    rest = tuple(n for n in trained if n not in decayed)
    groups = (
        ParameterGroup(tuple(n for n in trained if n in decayed), {}),
        ParameterGroup(rest, {"weight_decay": 0.0}),
    )
    return tuple(g for g in groups if g.names)


def _names_the_trainer_decays(module: nn.Module) -> set[str]:
    """Return the names of the parameters that transformers' Trainer decays (get_decay_parameter_names of 5.23)."""
    inside = tuple(f"{name}." for name, child in module.named_modules() if name and isinstance(child, nn.LayerNorm))
    return {n for n, _ in module.named_parameters() if not n.startswith(inside) and not _is_bias_or_norm(n.lower())}


def _is_bias_or_norm(name: str) -> bool:
    if any(word in name for word in ("bias", "layernorm", "rmsnorm")):
        return True
    return any(part == "norm" or part.endswith("_norm") for part in name.split("."))


def _groups_of_task(
    task_groups: Iterable[Mapping[str, Any]],
    trained: Mapping[str, nn.Parameter],
    module: nn.Module,
    config: Config,
    *,
    own: bool,
) -> tuple[ParameterGroup, ...]:
    names = {id(p): n for n, p in module.named_parameters()}
    allowed = None if own else set(config.train.optimizer.arguments("cpu")) - {"fused", "foreach"}
    if allowed is not None and config.train.optimizer.whole_matrices:
        allowed.add("matrices")
    grouped: set[str] = set()
    groups: list[ParameterGroup] = []
    for i, group in enumerate(task_groups):
        params: Any = group.get("params")
        if params is None:
            raise TaskError(f"groups(): group {i} has no 'params'")
        members = [params] if isinstance(params, nn.Parameter) else list(params)
        unknown = [k for k in group if k != "params" and allowed is not None and k not in allowed]
        if unknown and allowed is not None:
            raise TaskError(f"groups(): group {i} sets {unknown[0]!r}; this optimizer has {', '.join(sorted(allowed))}")
        for p in members:
            if id(p) not in names:
                raise TaskError(
                    f"groups(): group {i} holds a parameter that is not the model's; take parameters from "
                    "model.parameters()"
                )
        mine = [names[id(p)] for p in members if p.requires_grad]
        twice = [n for n in mine if n in grouped]
        if twice:
            raise TaskError(f"groups(): {twice[0]!r} is in two groups; leave it in one")
        grouped.update(mine)
        groups.append(ParameterGroup(tuple(mine), {k: v for k, v in group.items() if k != "params"}))
    left = [n for n in trained if n not in grouped]
    if left:
        raise TaskError(
            f"groups() leaves out {first_few(left, most=4)}: give every trained parameter a group, or freeze it"
        )
    return tuple(g for g in groups if g.names)


@final
class OptimizerFactory:
    """Function that makes the optimizer once parameters have their final place: the config's or the task's own."""

    def __init__(
        self, groups: tuple[ParameterGroup, ...], config: Config, device: torch.device, own: MakeOptimizer | None
    ) -> None:
        if own is not None:
            _refuse_unused_settings(config)
        self._groups, self._wanted, self._device, self._own = groups, config.train.optimizer, device, own
        self._seed = config.train.seed
        self._scale = config.train.lr_scale.factor(config.batch.size or 1)
        self.made = ""
        """Name of the class of the optimizer that was made last; empty before."""

        self.rates: tuple[float, ...] = ()
        """Base learning rate of each of its groups."""

    def __call__(self, module: nn.Module, *, split: bool | None = None) -> Optimizer:
        """Return the optimizer; `split`: parameters are split over ranks. None: as DTensors are."""
        optimizer = self._make(module, split=split)
        self.made = type(optimizer).__name__
        self.rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        return optimizer

    def _make(self, module: nn.Module, *, split: bool | None) -> Optimizer:
        now, wanted = dict(module.named_parameters()), self._wanted
        made: list[dict[str, Any]] = []
        for group in self._groups:
            lr = group.settings.get("lr", float(wanted.lr)) * self._scale
            names = [n for n in group.names if n in now]  # a stage of a pipeline has some of them
            made.append({"params": [now[n] for n in names], **group.settings, "lr": lr})
            if wanted.moments_in_bf16:
                made[-1]["names"] = names
        if self._own is not None:
            decay = {"weight_decay": float(wanted.weight_decay)}
            optimizer = _create_own_optimizer(self._own, [decay | group for group in made], now)
            if isinstance(optimizer, MatrixOptimizer):
                optimizer.separate([now[n] for group in self._groups for n in group.matrices if n in now])
            return optimizer
        if split is None:
            split = any(isinstance(p, DTensor) for group in made for p in group["params"])
        arguments = wanted.arguments(self._device.type, split=split)
        if wanted.moments_in_bf16:
            arguments["seed"] = self._seed
        return optimizer_class(wanted)(made, **arguments)


def refuse_whole_matrices(own: MakeOptimizer, ranks: int) -> None:
    """Raise TaskError if the task's optimizer updates a matrix otherwise than its halves, as `parallel.tensor` needs.

    It is tried on one small matrix, whole and as two.
    """
    generator = torch.Generator().manual_seed(0)
    matrix, gradient = (torch.randn(6, 4, generator=generator) for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.0}
    updated: list[torch.Tensor] = []
    for sizes in ([6], [3, 3]):
        params = [nn.Parameter(part.clone()) for part in matrix.split(sizes)]
        for p, g in zip(params, gradient.split(sizes), strict=True):
            p.grad = g.clone()
        optimizer = own([{"params": params, **settings}])
        if isinstance(optimizer, Optimizer):
            optimizer.step()
        updated.append(torch.cat([p.detach() for p in params]))
    change = (updated[0] - matrix).norm()
    if float((updated[0] - updated[1]).norm()) > 1e-4 * float(change):
        raise TaskError(
            f"parallel.tensor: {ranks} gives each rank a part of each matrix, and the task's optimizer() updates a "
            "full matrix (two halves of one are updated otherwise): leave parallel.tensor out, or take an "
            "optimizer that updates element by element"
        )


def _create_own_optimizer(
    own: MakeOptimizer, groups: list[dict[str, Any]], names: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Return the task's optimizer; raise TaskError unless it covers exactly the parameters of the groups."""
    wanted = {id(p) for group in groups for p in group["params"]}
    optimizer: Any = own(groups)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"optimizer() returned {optimizer!r}; it must return a torch.optim.Optimizer over the groups that it is "
            "given"
        )
    if _needs_closure(optimizer):
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}, whose step() needs a closure, which computes the loss "
            "again: a step of unipar has the gradients of one batch; return an optimizer whose step() does without"
        )
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if left := [name for name, p in names.items() if id(p) in wanted - covered]:
        raise TaskError(f"optimizer() leaves out {left[0]!r}: give it all groups, or freeze the parameter")
    if covered - wanted:
        raise TaskError(
            "optimizer() holds a parameter that is in none of the groups passed to it; build it from these groups"
        )
    return optimizer


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step must be given a function, as LBFGS's is."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _refuse_unused_settings(config: Config) -> None:
    """Raise TaskError if the config sets what has no effect on the task's own optimizer."""
    optimizer = config.train.optimizer
    unused = {
        "name": "adamw",
        **{k: f.default for k, f in type(optimizer).model_fields.items() if k not in _KEYS_WITH_EFFECT},
    }
    for key, default in unused.items():
        if (value := getattr(optimizer, key)) != default:
            raise TaskError(
                f"train.optimizer.{key}: {value} has no effect, as the task makes an optimizer of its own: leave it "
                "out; lr, weight_decay and decay are in the groups that it is given"
            )


_KEYS_WITH_EFFECT = ("name", "lr", "weight_decay", "decay", "fused", "foreach")
"""Keys that a task's own optimizer receives, or that only choose kernels."""
