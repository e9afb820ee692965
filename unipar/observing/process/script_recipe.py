"""`ScriptRecipe`: how a script makes its training, noted until its first update, for `unipar observe --to task`."""

from __future__ import annotations

import functools
import json
import os
import sys
import weakref
from argparse import Namespace
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SequentialSampler, default_collate

from unipar.backend import registry
from unipar.config import Config
from unipar.model.parameter_groups import parameter_groups
from unipar.observing.libraries import name_callers
from unipar.observing.process.python_text import (
    MadeModules,
    line_of_frame,
    place_in_script,
    python_of,
    script_frames,
    seen_object,
    variables_of,
)
from unipar.observing.process.script_state import ScriptState, is_a, layers_of, wrapper_of
from unipar.results.observed_recipe import (
    CodePlace,
    Recipe,
    SeenLoader,
    SeenLoss,
    SeenObject,
    SeenOptimizer,
    SeenSchedule,
)
from unipar.utils.text import short_dtype

_LARGEST_SEED: Final = 2**32
"""Seed from which it is one that PyTorch has drawn, when nobody gave one."""

_DEEPEST: Final = 5
"""Number of samplers inside one another."""

_DECAYS: Final = ("matrices", "transformers")


@final
class ScriptRecipe:
    """Notes on how a script makes model, data, optimizer and loss."""

    def __init__(self, state: ScriptState) -> None:
        for record in (CodePlace, SeenObject, SeenLoader, SeenLoss, SeenOptimizer, SeenSchedule, Recipe):
            record.model_rebuild()  # before the base mark: no account has what pydantic builds on first use
        self._state = state
        self._modules = MadeModules()
        self.open = True
        """Whether the first update is still to come."""

        self._seed: int | None = None
        self._loaders: dict[int, Any] = {}
        self._dataset: int | None = None
        self._loader: SeenLoader | None = None
        self._batch_keys: tuple[str, ...] = ()
        self._groups: dict[int, tuple[weakref.ref[Optimizer], list[tuple[dict[str, Any], list[Any]]]]] = {}
        self._schedules: dict[int, SeenSchedule] = {}
        self._loss: SeenLoss | None = None
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        """Variables at the first backward that hold a model."""

        self._arguments: dict[str, dict[str, Any]] = {}
        self._autocast = ""
        self.loss_scaling = False
        self.norm_type = 2.0
        self._made: Recipe | None = None

    # What the script calls

    def module_made(self, module: nn.Module) -> None:
        """Note with which arguments a module is made."""
        if self.open:
            if self._seed is None:
                self._seed = torch.initial_seed()
            self._modules.note(module, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Note an optimizer's groups, which libraries replace later."""
        if self.open:
            self._groups[id(optimizer)] = weakref.ref(optimizer), _groups_of(optimizer)

    def schedule_stepped(self, schedule: Any) -> None:
        """Note a schedule of the learning rate."""
        if id(schedule) not in self._schedules:
            functions = [getattr(f, "func", f) for f in getattr(schedule, "lr_lambdas", ())]
            self._schedules[id(schedule)] = SeenSchedule(
                name=type(schedule).__name__,
                numbers=_numbers_of(schedule),
                functions=tuple(str(getattr(f, "__name__", type(f).__name__)) for f in functions),
            )

    def epoch_begun(self, loader: Any) -> None:
        """Note a loader over which the script iterates."""
        if self.open:
            self._loaders[id(getattr(loader, "dataset", None))] = loader

    def batch_read(self, batch: Any, iterator: Any) -> None:
        """Note from which loader a batch of the training comes."""
        if self.open and torch.is_grad_enabled():
            self._dataset = id(getattr(iterator, "_dataset", None))
            data = batch if isinstance(batch, dict) else getattr(batch, "data", None)
            self._batch_keys = tuple(map(str, data)) if isinstance(data, dict) else ()

    def autocast_entered(self, context: Any) -> None:
        """Note the dtype of an autocast."""
        if self.open and torch.is_grad_enabled() and getattr(context, "_enabled", False):
            self._autocast = short_dtype(context.fast_dtype)

    def backward_called(self) -> None:
        """Note the line that calls backward, the first time."""
        if not self.open or self._loss is not None:
            return
        for frame in script_frames(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            place, *callers = [line_of_frame(f) for f in script_frames(frame)]
            self._loss = SeenLoss(place=place, callers=tuple(callers))
            self._models = {name: weakref.ref(v) for name, v in variables_of(frame) if _is_model(v)}
            self._arguments = {
                name: {key: value for key, value in vars(space).items() if _is_plain(value)}
                for f in script_frames(frame)
                for name, space in variables_of(f)
                if type(space) is Namespace
            }
            return

    # What becomes of it

    def describe(self) -> None:
        """Put together what was noted, when an optimizer takes its first step."""
        models, optimizers = self._state.models, self._state.optimizers
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if self.open:
            self._loader = self._describe_loader(frame)
            self._loaders.clear()  # a script may have dropped them
        self.open = False
        wrappers = self._state.wrappers
        layers = list(layers_of(models[0], wrappers)) if models else []
        labels = {base: label for base, label in wrappers.items() if label != "compiled"}
        backend, config = self._library_of(models, frame)
        self._made = Recipe(
            script=_script_of(),
            **(_describe_layers(layers, self._modules) if layers else {}),
            wrappers=tuple(dict.fromkeys(label for m in layers if (label := wrapper_of(m, labels)))),
            backend=backend,
            library_config=config,
            mesh=next((_mesh_of(p) for _, p in self._state.named_parameters() if isinstance(p, DTensor)), ()),
            optimizers=tuple(self._describe_optimizer(o, layers[-1] if layers else None) for o in optimizers),
            loader=self._loader,
            batch_keys=self._batch_keys,
            loss=self._describe_loss(layers),
            arguments=self._arguments,
            seed=None if self._seed is None or self._seed >= _LARGEST_SEED else self._seed,
        )

    @property
    def schedules(self) -> list[SeenSchedule]:
        """Schedules of the learning rate that were stepped."""
        return list(self._schedules.values())

    @property
    def made(self) -> Recipe | None:
        """The notes until now; None before the first update."""
        if self._made is None:
            return None
        late = {
            "schedules": tuple(self.schedules),
            "autocast": self._made.autocast or self._autocast,
            "loss_scaling": self.loss_scaling,
            "norm_type": self.norm_type,
        }
        return self._made.model_copy(update=late)

    def _library_of(self, models: list[nn.Module], frame: FrameType) -> tuple[str, dict[str, Any]]:
        """Return the backend whose library trains, and the library's config; "" if no backend's does."""
        callers = name_callers(frame)
        found = ""
        for name in registry.backend_names():
            library = registry.find_backend(name).observed_library
            if library is None:
                continue
            wraps = any(is_a(layer, cls) for model in models for layer in model.modules() for cls in library.wrappers)
            if wraps:
                config = next((c for m in models if (c := library.config_of(m)) is not None), {})
                return name, json.loads(json.dumps(config, default=str))
            if callers[:1] == (library.name,):
                found = name
        return found, {}

    def _describe_optimizer(self, optimizer: Optimizer, model: nn.Module | None) -> SeenOptimizer:
        known = self._groups.get(id(optimizer))
        groups = known[1] if known is not None and known[0]() is optimizer else _groups_of(optimizer)
        settings = groups[0][0]
        kind = next((c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")), Optimizer)
        kind = type(optimizer) if kind is Optimizer else kind
        differ = tuple({k: v for k, v in other.items() if settings.get(k) != v} for other, _ in groups)
        kept = [[p for ref in refs if (p := ref()) is not None] for _, refs in groups]
        decayed = [id(p) for (own, _), ps in zip(groups, kept, strict=True) if own.get("weight_decay") for p in ps]
        return SeenOptimizer(
            name=kind.__qualname__,
            module=kind.__module__,
            settings=settings,
            groups=differ,
            decay=_decay_of(model, set(decayed), {id(p) for ps in kept for p in ps}),
            weights=sum(map(len, kept)),
        )

    def _describe_loss(self, layers: list[nn.Module]) -> SeenLoss | None:
        if self._loss is None or not layers:
            return self._loss
        inside = {name: set(map(id, m.modules())) for name, ref in self._models.items() if (m := ref()) is not None}
        mine = tuple(name for name, modules in inside.items() if id(layers[-1]) in modules)
        others = tuple(name for name in inside if name not in mine)
        return self._loss.model_copy(update={"models": mine, "others": others})

    def _describe_loader(self, frame: FrameType) -> SeenLoader | None:
        loader = None if self._dataset is None else self._loaders.get(self._dataset)
        if loader is None:
            return None
        dataset, around = loader.dataset, list[str]()
        while type(dataset).__module__.startswith("torch.utils.data") and hasattr(dataset, "dataset"):
            around.append(type(dataset).__name__)
            dataset = dataset.dataset
        sized = hasattr(type(loader.dataset), "__len__")
        return SeenLoader(
            dataset=_describe_value(dataset, frame),
            wrapped_in=tuple(around),
            collate=_describe_collate(loader.collate_fn, frame),
            batch_size=getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None),
            shuffle=_shuffles(loader),
            workers=loader.num_workers,
            drop_last=bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
            samples=len(loader.dataset) if sized else None,
        )


def _script_of() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(file) if file else ""


def _describe_layers(layers: list[nn.Module], modules: MadeModules) -> dict[str, Any]:
    """Return what is known of a model and of its wrappers, which come before it."""
    model = layers[-1]
    inside = list(layers[0].modules())
    compiled = [m for m in inside if is_a(m, "OptimizedModule") or getattr(m, "_compiled_call_impl", None) is not None]
    whole = any(m is layer for m in compiled for layer in layers)
    name: Any = getattr(model, "name_or_path", None)
    seen = modules.describe(model)
    if name and isinstance(name, str) and hasattr(type(model), "from_pretrained"):
        text = f"{seen.name}.from_pretrained({name!r})"
        seen = seen.model_copy(update={"expression": text, "imports": {seen.name: seen.module}, "unknown": ()})
    return {
        "model": seen,
        "pretrained": bool(name),
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "sync_batchnorm": any(isinstance(m, nn.SyncBatchNorm) for m in inside),
        "compiled": "" if not compiled else "model" if whole else "blocks",
        "recompute": any(_recomputes(m) for m in inside),
        "autocast": next((d for m in inside if (d := _mixed_dtype(m))), ""),
    }


def _recomputes(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True or hasattr(module, "_checkpoint_wrapped_module")


def _mixed_dtype(module: Any) -> str:
    """Return the dtype in which a wrapper computes, if it is not that of the weights."""
    state = getattr(module, "_get_fsdp_state", None)
    policy: Any = getattr(module, "mixed_precision", None) or (getattr(state(), "_mp_policy", None) if state else None)
    dtype = getattr(policy, "param_dtype", None)
    return short_dtype(dtype) if isinstance(dtype, torch.dtype) else ""


def _is_model(value: Any) -> bool:
    return issubclass(type(value), nn.Module) and any(p.requires_grad for p in value.parameters())


def _mesh_of(parameter: Any) -> tuple[int, ...]:
    sizes = tuple(parameter.device_mesh.shape)
    return sizes if len(sizes) > 1 else ()


def _groups_of(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the settings of each group that are plain values, and its parameters."""
    return [
        (
            {k: _plain(v) for k, v in group.items() if _is_plain(v)}
            | ({"lr": _plain(group["initial_lr"])} if "initial_lr" in group else {}),
            [weakref.ref(p) for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) < 4 and all(_is_plain(v) and not isinstance(v, tuple | list) for v in value)
    if isinstance(value, Tensor):
        return not value.dim()
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _decay_of(model: nn.Module | None, decayed: set[int], updated: set[int]) -> str:
    """Return which parameters decay, as `train.optimizer.decay` says it."""
    if not decayed or decayed == updated or model is None:
        return "all"
    named = dict(model.named_parameters())
    for rule in _DECAYS:
        settings: Any = {"batch": {"total": 1}, "train": {"steps": 1, "optimizer": {"decay": rule}}}
        groups = parameter_groups(model, Config.model_validate(settings), None, own_optimizer=False)
        if decayed == {id(named[n]) for group in groups if "weight_decay" not in group.settings for n in group.names}:
            return rule
    return "own"


def _numbers_of(schedule: Any) -> dict[str, float]:
    """Return the settings of a schedule that are numbers, those of its functions too, and the rates it goes by."""
    found: dict[str, float] = {}
    group = schedule.optimizer.param_groups[0]
    for key, theirs in (("base_lr", "initial_lr"), ("max_lr", "max_lr"), ("min_lr", "min_lr")):
        if isinstance(group.get(theirs), int | float):
            found[key] = float(group[theirs])
    for key, value in vars(schedule).items():
        if key == "lr_lambdas":
            for function in value:
                keywords = function.keywords if isinstance(function, functools.partial) else {}
                found |= {k: float(v) for k, v in keywords.items() if isinstance(v, int | float)}
        elif isinstance(value, int | float) and not key.startswith("_") and key not in ("last_epoch", "verbose"):
            found[key] = float(value)
        elif key == "milestones" and isinstance(value, Mapping):
            found |= {f"milestones[{i}]": float(at) for i, at in enumerate(sorted(value))}
        elif key == "_schedule_phases" and isinstance(value, list) and value:
            found["end_step"] = float(value[0]["end_step"])
    return found


def _shuffles(loader: Any) -> bool | None:
    """Return whether a loader draws its order at random, or None if a sampler of the script's own decides."""
    sampler: Any = loader.batch_sampler or loader.sampler
    for _ in range(_DEEPEST):
        if isinstance(sampler, RandomSampler):
            return True
        if isinstance(sampler, SequentialSampler):
            return False
        shuffle = getattr(sampler, "shuffle", None)  # an attribute of samplers for several ranks
        if isinstance(shuffle, bool):
            return shuffle
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None


def _describe_collate(collate: Any, frame: FrameType) -> SeenObject | None:
    """Return what makes batches, or None if it is PyTorch's own function."""
    while not isinstance(collate, FunctionType) and (inner := getattr(collate, "data_collator", None)) is not None:
        collate = inner
    if collate is None or collate is default_collate:
        return None
    return _describe_value(collate, frame)


def _describe_value(value: Any, frame: FrameType) -> SeenObject:
    """Return what is known of an object: how it is written, or else which variable holds it."""
    written = python_of(value)
    for caller in script_frames(frame):
        name = next((n for n, v in variables_of(caller) if v is value and n.isidentifier()), "")
        if name:
            return seen_object(_kind_of(value), written, line_of_frame(caller), name)
    return seen_object(_kind_of(value), written, place_in_script(frame))


def _kind_of(value: Any) -> Any:
    return value if isinstance(value, FunctionType) else type(value)
