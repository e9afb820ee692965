"""`ScriptState`: models, optimizers and other tensors of a script, found without a change of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from unipar.backend import Category, Holding
from unipar.backend.observed_library import ObservedLibrary
from unipar.engines.state import local_part, module_holdings

_FLAT_TENSORS: Final[Mapping[str, Category]] = {
    "_local_shard": "parameters",
    "_full_param_padded": "communication",
    "_mp_shard": "communication",
    "_saved_grad_shard": "gradients",
    "grad": "gradients",
}
"""Attributes of a flat parameter of FullyShardedDataParallel that are tensors."""

MOST_PARTS: Final = 64
"""Number of parts of a dataset's list in which tensors are looked for; longer lists hold samples."""

_WRAPPED: Final = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module"}
)
"""Parts of names that wrappers add to those of the user's model."""


@final
class ScriptState:
    """Models and optimizers that train, held weakly; who keeps which tensor."""

    def __init__(self, libraries: Sequence[ObservedLibrary]) -> None:
        self.libraries = libraries
        """All libraries that unipar knows."""

        self._models: list[weakref.ref[nn.Module]] = []
        self._trained: list[weakref.ref[nn.Module]] = []
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._datasets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def models(self) -> list[nn.Module]:
        """Outermost modules that have parameters, those of the trained ones first."""
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def wrappers(self) -> Mapping[str, str]:
        """Names that users have for the wrappers of libraries, by class."""
        return {name: label for library in self.libraries for name, label in library.wrappers.items()}

    @property
    def trained(self) -> list[nn.Module]:
        """Those models of which an optimizer has weights, in the order of the optimizers: the same on all ranks."""
        return [model for ref in self._trained if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have taken a step."""
        return [optimizer for ref in self._optimizers.values() if (optimizer := ref()) is not None]

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer has taken a step before."""
        ref = self._optimizers.get(id(optimizer))
        return ref is not None and ref() is optimizer

    def add(self, optimizer: Optimizer) -> None:
        """Note an optimizer, and look for the models once more."""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self.look_again()

    def add_dataset(self, dataset: Any) -> None:
        """Note a dataset over which the script iterates."""
        with suppress(TypeError):  # a list, say, has no weak references
            self._datasets[id(dataset)] = dataset

    def look_again(self) -> None:
        """Look for the models once more."""
        models, trained = self._find_models()
        self._models = [weakref.ref(model) for model in models]
        self._trained = [weakref.ref(model) for model in trained]

    def _find_models(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the models, and those of them that train.

        If an optimizer has no weight of any model, they are those with gradients, or all: a library keeps what it
        trains apart.
        """
        modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]  # a proxy may import on isinstance
        inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
        place = {id(p): at for at, p in enumerate(chain.from_iterable(map(parameters_of, self.optimizers)))}
        models = [
            module
            for module in modules
            if id(module) not in inner and "_parameters" in vars(module) and any(True for _ in module.parameters())
        ]
        places = {id(m): min(place.get(id(p), len(place)) for p in m.parameters()) for m in models}
        trained = sorted((m for m in models if places[id(m)] < len(place)), key=lambda m: places[id(m)])
        trained = trained or [m for m in models if any(p.grad is not None for p in m.parameters())] or models
        return [*trained, *(m for m in models if not any(m is other for other in trained))], trained

    # What is kept

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of the models, or of those that train, once, by its name in the user's model."""
        known: set[int] = set()
        names: set[str] = set()
        for number, model in enumerate(self.trained if trained else self.models):
            for name, parameter in model.named_parameters():
                if id(parameter) in known:
                    continue
                known.add(id(parameter))
                own = own_name(name)
                names.add(unique := own if own not in names else f"{own} of model {number}")
                yield unique, parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each buffer of the models that train, by its name in the user's model."""
        names: set[str] = set()
        for number, model in enumerate(self.trained):
            for name, buffer in model.named_buffers():
                own = own_name(name)
                names.add(unique := own if own not in names else f"{own} of model {number}")
                yield unique, buffer

    def named_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name of the parameter, key and value of each tensor that an optimizer keeps."""
        names = {id(p): name for name, p in self.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for place, (parameter, state) in enumerate(list(optimizer.state.items())):
                name = names.get(id(parameter), f"optimizer {number}[{place}]")
                for key, value in list(state.items()) if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        yield name, str(key), value

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of optimizers that no model has: a library's own copies, or a mistake of the script."""
        known = {id(p) for _, p in self.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for place, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in known:
                    yield f"optimizer {number}[{place}]", parameter

    def holdings(self) -> Iterator[Holding]:
        """Yield all tensors that the script's models and optimizers keep now, with their purpose."""
        of_library: set[int] = set()
        for model in self.models:
            for library in self.libraries:
                if (kept := library.holdings(model)) is not None:
                    of_library |= {id(p) for p in model.parameters()}
                    yield from kept
        gathered = {id(p) for model in self.models for p in _gathered_parameters(model)}
        for name, parameter in self.named_parameters():
            if id(parameter) not in of_library:
                category = "communication" if id(parameter) in gathered else "parameters"
                yield Holding(category, name, local_part(parameter.detach()))
                yield from _gradient(name, parameter)
        for model in self.models:
            yield from module_holdings(model)
            yield from _flat_holdings(model)
        for name, tensor in self.masters():
            yield Holding("masters", name, tensor.detach())
            yield from _gradient(name, tensor)
        for name, key, value in self.named_states():
            yield Holding("optimizer", f"{key} of {name}", local_part(value))
        for dataset in list(self._datasets.values()):
            yield from (Holding("runtime", "dataset", tensor) for tensor in _tensors_of_dataset(dataset))


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors_of_dataset(dataset: Any) -> Iterator[Tensor]:
    """Yield the tensors that are attributes of a dataset, or of the datasets that it is made of."""
    datasets = [dataset]
    for known in datasets:  # grows
        for value in getattr(known, "__dict__", {}).values():
            for part in value[:MOST_PARTS] if isinstance(value, tuple | list) else (value,):
                if isinstance(part, Tensor):
                    yield part
                elif isinstance(part, Dataset) and not any(part is other for other in datasets):
                    datasets.append(part)


def layers_of(model: nn.Module, wrappers: Mapping[str, str]) -> Iterator[nn.Module]:
    """Yield a model's wrappers, the outermost first, and then the user's own model."""
    yield model
    while type(model).__name__ in wrappers or type(model).__module__.startswith("torch.nn.parallel"):
        inner = next(iter(model.children()), None)
        if inner is None:
            return
        yield (model := inner)


def wrapper_of(model: nn.Module, wrappers: Mapping[str, str]) -> str:
    """Return the name that users have for a model's wrapper, or ""."""
    return next((label for base, label in wrappers.items() if is_a(model, base)), "")


def is_a(module: nn.Module, base: str) -> bool:
    """Return whether a module's class, or a base of it, has this name, whose module need not be imported."""
    return any(cls.__name__ == base for cls in type(module).__mro__)


def own_name(name: str) -> str:
    """Return the name that a parameter has in the user's model, without what wrappers add."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in _WRAPPED), last])


def _gradient(name: str, parameter: Tensor) -> Iterable[Holding]:
    if parameter.grad is not None:
        yield Holding("gradients", name, local_part(parameter.grad))


def _gathered_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that fully_shard has put in the place of its parts, until it takes them away again."""
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        for part in getattr(group, "fsdp_params", ()):
            if isinstance(whole := getattr(part, "_unsharded_param", None), nn.Parameter):
                yield whole


def _flat_holdings(model: nn.Module) -> Iterator[Holding]:
    """Yield what FullyShardedDataParallel keeps in flat tensors, of which its parameters are views."""
    for module in model.modules():
        flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
        for attribute, category in _FLAT_TENSORS.items():
            if isinstance(value := getattr(flat, attribute, None), Tensor):
                yield Holding(category, attribute.strip("_"), value)


def whole_size(parameter: Tensor) -> int:
    """Return the number of elements of a parameter on all ranks together."""
    flat: Any = getattr(parameter, "_unpadded_unsharded_size", None)
    return int(flat.numel() if flat is not None else getattr(parameter, "ds_numel", parameter.numel()))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks hold different parts of a parameter, so that its values say nothing about copies.

    Two attributes are those by which Megatron's layers and experts of a mixture say so.
    """
    if isinstance(tensor, DTensor):
        return any(not placement.is_replicate() for placement in tensor.placements)
    if getattr(tensor, "tensor_model_parallel", False) or not getattr(tensor, "allreduce", True):
        return True
    return hasattr(tensor, "ds_id") or hasattr(tensor, "_sharded_size") or hasattr(tensor, "_fsdp_flattened")


def seat_in_mesh(tensor: Tensor) -> str:
    """Return which part of a sharded parameter this rank holds, as text; "" if it holds all of it."""
    if not isinstance(tensor, DTensor):
        return ""
    seat = tensor.device_mesh.get_coordinate() or ()
    parts = [at for at, placement in zip(seat, tensor.placements, strict=False) if not placement.is_replicate()]
    return f" part {','.join(map(str, parts))}" if parts else ""
