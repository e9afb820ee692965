"""DeepSpeed's expert parallelism (AutoEP): layers that it replaces, and the user's parameters that a rank has."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec, parse_autoep_config
from deepspeed.module_inject.auto_ep_presets import registry
from deepspeed.module_inject.auto_ep_presets.base import TransformersTopLevelRouterLogitsAdapter
from deepspeed.module_inject.auto_ep_presets.registry import (
    available_preset_names,
    get_preset,
    preset_name_for_hf_model_type,
)
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override
from unipar_mesh.expert.expert_layer import ExpertLayer
from unipar_mesh.expert.token_counts import TokenCounts
from unipar_mesh.look_at_model import WholeModel, whole_gradients
from unipar_mesh.model_split import made_on_first_rank, microbatches

from unipar.backend import Part, Region
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.forward import ForwardCall
from unipar.errors import TaskError
from unipar.utils.text import first_few

_ROUTER, _EXPERTS = "gate", "experts"
"""Names of the two modules that every layer of AutoEP's presets has."""

_ONE_PRODUCT = {"gate_up_impl": "fused", "disable_triton_grouped_mm": True}
"""Gate and up in one product, as in the user's model: their gradients are added up before they are rounded to bf16."""

_UNSAVED_BUFFER = "tokens_per_expert"
"""Buffer of AutoEP's layers that counts tokens, and that no computation reads."""


@final
@dataclass(frozen=True)
class ExpertPart:
    """Range of each of this rank's experts in a user's parameter, which is one parameter of AutoEP's."""

    name: str
    """The user's parameter, stacked along its first dimension."""

    shape: tuple[int, ...]
    first: int
    """First element of this rank's first expert."""

    width: int
    """Number of elements of each expert; the user's parameter has more where it joins two of AutoEP's."""

    def regions(self, start: int, length: int) -> Iterator[tuple[Region, Region]]:
        """Yield regions of the user's parameter that a range of AutoEP's holds, and where in that range."""
        row, at, stop = math.prod(self.shape[1:]), start, start + length
        while at < stop:
            expert, inner = divmod(at, self.width)
            runs = (stop - at) // self.width if inner == 0 else 0
            size = self.width if runs else min(self.width - inner, stop - at)
            first, place = self.first + expert * row + inner, at - start
            if runs > 1:
                yield Region(first, size, row, runs), Region(place, size, size, runs)
            else:
                yield Region(first, size), Region(place, size)
            at += size * max(runs, 1)


@final
@dataclass(frozen=True)
class ExpertSplit:
    """Layers that AutoEP replaces, and whose parameters get other names and shapes by it."""

    batch: Any
    """Microbatch on which this rank is tried: those with other experts have others."""

    ranks: int
    preset: str
    layers: Sequence[str]

    config: Any
    """Config of the model that has the layers, as transformers has it, which AutoEP reads."""

    cuts: Mapping[str, ExpertPart]
    """Parts by AutoEP's name of the parameter."""

    renamed: Mapping[str, str]
    """The user's names by AutoEP's, where a layer's other parameters and buffers are moved: by prefix."""

    key: ClassVar[str] = "expert_parallel"
    """DeepSpeed's section."""

    speaks_for_whole: ClassVar[bool] = True
    """Whether this rank has a gradient of its own of parameters that are not cut."""

    @property
    def samples(self) -> int:
        """Number of microbatches on which the model is tried."""
        return self.ranks

    @classmethod
    def of(cls, model: nn.Module, batch: Any, ranks: int, seat: int) -> ExpertSplit:
        """Return what AutoEP makes of a model, which is whole here; raise TaskError for one that it does not take."""
        found = [name for name, module in model.named_modules() if _is_layer(module)]
        if not found:
            raise TaskError(_no_layers(model, ranks))
        config = _config_of(model, found[0])
        preset = _preset_of(config)
        auto = AutoEP(_with_config(model, config), parse_autoep_config(_section(ranks, preset, found)))
        try:
            specs = auto.ep_parser()
        except ValueError as error:
            raise TaskError(f"DeepSpeed's AutoEP does not take this model: {error}") from error
        cuts: dict[str, ExpertPart] = {}
        renamed: dict[str, str] = {}
        for spec in specs:
            cuts |= _parts_of_layer(model, spec, ranks, seat)
            renamed[f"{spec.moe_module_name}.router.gate."] = f"{spec.moe_module_name}.{spec.router_name}."
            renamed[f"{spec.moe_module_name}.router."] = f"{spec.moe_module_name}.{spec.router_name}."
            if spec.has_shared_experts:
                renamed[f"{spec.moe_module_name}.shared_experts."] = (
                    f"{spec.moe_module_name}.{spec.shared_experts_name}."
                )
                if spec.shared_experts_gate_name:
                    renamed[f"{spec.moe_module_name}.shared_experts_gate."] = (
                        f"{spec.moe_module_name}.{spec.shared_experts_gate_name}."
                    )
        return cls(batch, ranks, preset, found, config, cuts, renamed)

    def section(self, prefix: str) -> dict[str, Any]:
        """Return DeepSpeed's section `expert_parallel`; `prefix`: of the model in what DeepSpeed is given."""
        return _section(self.ranks, self.preset, [f"{prefix}{name}" for name in self.layers])

    def saved_name(self, name: str) -> str:
        """Return the user's name of one of AutoEP's parameters or buffers."""
        if name in self.cuts:
            return self.cuts[name].name
        for mine, users in self.renamed.items():
            if name.startswith(mine):
                return users + name.removeprefix(mine)
        return name

    def regions(self, name: str, start: int, length: int) -> Iterator[tuple[Region, Region]]:
        """Yield regions of the user's parameter that a range of this rank's part holds, and where in that range."""
        yield from self.cuts[name].regions(start, length)

    def numel(self, name: str, p: Tensor) -> int:
        """Return how many elements of a user's parameter one rank has."""
        return p.numel() // self.ranks if any(cut.name == name for cut in self.cuts.values()) else p.numel()

    def saved_buffers(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the user's buffers by their names."""
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] != _UNSAVED_BUFFER:
                yield self.saved_name(name), buffer


def plan_experts(part: Part, config: Config, world: World) -> tuple[ExpertSplit, WholeModel]:
    """Return which layers AutoEP replaces, and loss and gradients of the whole model, which rank 0 has here."""

    def look() -> tuple[Sequence[Any], WholeModel]:
        assert part.loss is not None
        batches = microbatches(part, config.parallel.expert)
        return batches, whole_gradients(part.module, part.loss, *batches)

    ranks, seat = config.parallel.expert, world.mesh.expert_seat
    split = ExpertSplit.of(part.module, None, ranks, seat)
    batches, full = made_on_first_rank(world, look)
    return replace(split, batch=batches[seat]), full


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is laid out as a layer of AutoEP's presets: a router, and stacked experts beside it."""
    experts, router = getattr(module, _EXPERTS, None), getattr(module, _ROUTER, None)
    if not isinstance(experts, nn.Module) or not isinstance(getattr(router, "weight", None), Tensor):
        return False
    names = {(get_preset(preset).expert_w1, get_preset(preset).expert_w2) for preset in available_preset_names()}
    return any(all(getattr(getattr(experts, n, None), "ndim", 0) == 3 for n in pair) for pair in names)


def _no_layers(model: nn.Module, ranks: int) -> str:
    stacked = sorted({name.rpartition(".")[0] for name, p in model.named_parameters() if p.ndim == 3})
    seen = f"stacked matrices are in {first_few(stacked, most=3)}" if stacked else "it has no stacked matrices"
    return (
        f"parallel.expert: {ranks} by DeepSpeed's AutoEP needs layers with a router named gate and experts named "
        f"experts, whose gate_up_proj and down_proj are stacked, and this model has none ({seen}): use backend: "
        "native, which finds experts by trial, or leave expert out"
    )


def _config_of(model: nn.Module, layer: str) -> Any:
    """Return the config of the innermost model around a layer."""
    while layer:
        layer = layer.rpartition(".")[0]
        config: Any = getattr(model.get_submodule(layer), "config", None)
        if hasattr(config, "model_type"):
            return config
    raise TaskError(
        "DeepSpeed's AutoEP reads the number of experts of a token, and how their weights are scaled, from the model's "
        "config as transformers has it, and this model has none: use backend: native, or leave expert out"
    )


def _preset_of(config: Any) -> str:
    """Return the preset for a config: that of its model type, or the first whose numbers it has; a proof follows."""
    if (named := preset_name_for_hf_model_type(config.model_type)) is not None:
        return named
    for name in ("mixtral", "qwen3_moe"):  # their layers differ in the names of numbers alone
        preset = get_preset(name)
        if all(hasattr(config, key) for key in (preset.num_experts_attr, preset.top_k_attr)):
            return name
    raise TaskError(
        f"DeepSpeed's AutoEP has presets for {', '.join(available_preset_names())}, and the config of this model "
        f"({config.model_type}) has the numbers of none: use backend: native, or leave expert out"
    )


def _section(ranks: int, preset: str, layers: Sequence[str]) -> dict[str, Any]:
    return {
        "enabled": True,
        "autoep_size": ranks,
        "preset_model": preset,
        "moe_layer_pattern": "|".join(re.escape(name) for name in layers),
        **_ONE_PRODUCT,
    }


def _with_config(model: nn.Module, config: Any) -> nn.Module:
    """Return a module that has the model's modules by the same names, and the config."""
    holder = nn.Module()
    for name, child in model.named_children():
        holder.add_module(name, child)
    holder.config = config
    return holder


def _parts_of_layer(model: nn.Module, spec: MoELayerSpec, ranks: int, seat: int) -> Mapping[str, ExpertPart]:
    """Return what this rank has of a layer's experts."""
    if spec.num_experts % ranks:
        raise TaskError(
            f"parallel.expert: {ranks} does not divide the {spec.num_experts} experts of {spec.moe_module_name}: give "
            f"a divisor of {spec.num_experts}"
        )
    layer = spec.moe_module_name
    prefix = f"{layer}.{spec.experts_name}"
    experts = model.get_submodule(prefix)
    params: dict[str, Tensor] = dict(experts.named_parameters())
    sources = {"w1": spec.expert_w1_name, "w2": spec.expert_w2_name, "w3": spec.expert_w3_name or spec.expert_w1_name}
    if left := sorted(params.keys() - set(sources.values())):
        raise TaskError(
            f"DeepSpeed's AutoEP has no place for {', '.join(left)} of {prefix} and would drop it: use backend: native"
        )
    joined = spec.expert_w3_name is None
    layout = classify_fused_gate_up_layout(*(tuple(params[sources[w]].shape) for w in ("w1", "w2"))) if joined else None
    if layout is not None and layout.layout != "gate_up_first":
        raise TaskError(
            f"DeepSpeed's AutoEP transposes the matrices of {prefix}, of which no run has been compared with one "
            "process: use backend: native"
        )
    parts: dict[str, ExpertPart] = {}
    for mine, source in sources.items():
        shape = tuple(params[source].shape)
        row = math.prod(shape[1:])
        halves = 2 if joined and mine != "w2" else 1
        first = shape[0] // ranks * seat * row + (row // 2 if joined and mine == "w3" else 0)
        parts[f"{layer}.experts.{mine}"] = ExpertPart(f"{prefix}.{source}", shape, first, row // halves)
    return parts


def regroup(optimizer: Optimizer, users: Mapping[int, str], model: nn.Module, split: ExpertSplit) -> Optimizer:
    """Give an optimizer that was made of the user's parameters those of AutoEP, experts in groups of their own.

    `users`: the user's names by the ids of the parameters that it was made of.
    """
    groups = optimizer.param_groups
    number = {users[id(p)]: i for i, group in enumerate(groups) for p in group["params"]}
    dense: list[list[nn.Parameter]] = [[] for _ in groups]
    experts: list[list[nn.Parameter]] = [[] for _ in groups]
    for name, p in model.named_parameters():
        if (i := number.get(split.saved_name(name))) is not None:
            (experts if name in split.cuts else dense)[i].append(p)
    both = [
        *({**group, "params": mine} for group, mine in zip(groups, dense, strict=True) if mine),
        *(
            {**group, "params": mine, "moe": True, "name": f"ep_size_{split.ranks}"}
            for group, mine in zip(groups, experts, strict=True)
            if mine
        ),
    ]
    groups[:] = both
    return optimizer


def check_replaced(model: nn.Module, users: Iterable[str], split: ExpertSplit) -> None:
    """Raise TaskError unless the parameters that AutoEP has made are those that were planned."""
    made = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    if lost := set(users) ^ {split.saved_name(name) for name in made}:
        raise TaskError(f"AutoEP has other parameters than the model: {first_few(sorted(lost), most=3)}")
    for name, part in split.cuts.items():
        if (numel := math.prod(made[name])) != (own := part.shape[0] // split.ranks * part.width):
            raise TaskError(f"AutoEP made {numel} elements of {name}, of which this rank has {own}")


def let_experts_follow_autocast(model: nn.Module, split: ExpertSplit) -> None:
    """Let experts multiply in the dtype of autocast, which does not reach the product in groups that they take.

    What they return has the dtype of their rows, in which it is weighted and added up, as in the model's own layers.
    """
    for name in split.layers:
        experts = model.get_submodule(f"{name}.experts")
        experts.forward = partial(_in_autocast_dtype, experts.forward)


def count_tokens(model: nn.Module, split: ExpertSplit, world: World) -> TokenCounts:
    """Return counts to which AutoEP's routers add the tokens of each forward."""
    counts = TokenCounts([ExpertLayer(name, "stacked", experts) for name, experts in _experts_of(model, split)], world)
    world.groups.experts()  # all ranks make it here
    for name, (layer, _) in zip(split.layers, _experts_of(model, split), strict=True):
        model.get_submodule(f"{name}.router").register_forward_hook(partial(_add_tokens, counts, layer))
    return counts


def _experts_of(model: nn.Module, split: ExpertSplit) -> list[tuple[str, int]]:
    """Return the name of each layer's experts, and their number."""
    layers: list[Any] = [model.get_submodule(name) for name in split.layers]
    return [(f"{name}.{_EXPERTS}", layer.num_experts) for name, layer in zip(split.layers, layers, strict=True)]


def _add_tokens(counts: TokenCounts, layer: str, router: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
    """Add the tokens of a forward, which a router returns by expert behind weights and numbers."""
    counts.add(layer, outputs[2])


def _in_autocast_dtype(inner: Callable[..., Tensor], rows: Tensor, *others: Any) -> Tensor:
    kind = rows.device.type
    narrow = rows.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else rows
    return inner(narrow, *others).to(rows.dtype)


@contextmanager
def replaceable_layers(call: ForwardCall, split: ExpertSplit) -> Generator[None]:
    """Context manager: AutoEP finds a config on what it is given, and moves transformers' record of router logits.

    Since transformers 5.2 the table of these records is asked by model, and AutoEP asks by the class's name, with a
    default. It moves records in models of the types that its preset names alone, and here of this model's, too.
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    table: Any = getattr(capturing, "_CAN_RECORD_REGISTRY", None)
    kind, adapters = split.config.model_type, registry._PRESET_ADAPTERS  # pyright: ignore[reportPrivateUsage]
    preset = get_preset(split.preset).preset_adapter
    adapter = adapters[preset]
    if preset_name_for_hf_model_type(kind) is None:
        adapters[preset] = TransformersTopLevelRouterLogitsAdapter(
            display_name=kind, hf_model_types=(kind,), class_name_fragments=()
        )
    call.config = split.config
    if table is not None and type(table) is not dict:
        capturing._CAN_RECORD_REGISTRY = _OutputsByName(table)
    try:
        yield
    finally:
        del call.config
        adapters[preset] = adapter
        if table is not None:
            capturing._CAN_RECORD_REGISTRY = table


@final
class _OutputsByName(dict[str, Any]):
    """Transformers' table of the outputs that models can record, asked by a model or by the name of its class."""

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_class_name(key), value)

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(_class_name(key))
        return (found or {}) if isinstance(key, nn.Module) else default if found is None else found


def _class_name(key: Any) -> str:
    return key if isinstance(key, str) else str(key.__class__)
