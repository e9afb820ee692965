"""Changes to a model in place before a library takes it: recomputing, compiling, offloading, SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from unipar.config import Config
from unipar.config.sections.model import Compile, Model
from unipar.errors import ConfigError
from unipar.model.activation_offload import offload_activations
from unipar.utils.text import first_few

_ATEN: Any = torch.ops.aten
OPERATIONS_SAVED: tuple[Any, ...] = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
)
"""Operations whose results `selective` keeps: expensive to compute, and not larger than what follows from them."""

SURROUNDINGS: list[Callable[[], AbstractContextManager[Any]]] = []
"""Functions called in a recomputed block's first forward; what they return surrounds the forward when it runs again."""


def apply_transforms(module: nn.Module, blocks: Sequence[str], config: Config) -> None:
    """Apply the config's transforms to the model.

    They work in place, so that names stay, and before the library wraps the model, so that its hooks stay outside.
    """
    wanted = config.model
    if wanted.sync_batchnorm:
        _convert_batchnorms(module)
    for name in blocks_to_recompute(blocks, wanted):
        _recompute_forward(module.get_submodule(name), selective=wanted.recomputes == "selective")
    if wanted.compiling is not None:
        for part in parts_to_compile(module, blocks, wanted.compiling):
            # not part.compile(): it has no effect on modules of torch.nn itself, and would compile the libraries' hooks
            part.forward = torch.compile(part.forward, backend=wanted.compiling.backend)
    if wanted.offloads_activations:
        offload_activations(module, blocks)


def blocks_to_recompute(blocks: Sequence[str], wanted: Model) -> Sequence[str]:
    """Return the blocks that are recomputed: all under `fit`, until it is settled; raise ConfigError without any."""
    if wanted.recomputes == "none":
        return ()
    if not blocks:
        raise ConfigError(
            f"model.recompute: {wanted.recomputes} recomputes block by block, and the model has no blocks: name "
            "them in model.blocks or in the task's blocks(), or leave recompute out"
        )
    if not isinstance(wanted.recompute, tuple):
        return blocks
    for pattern in wanted.recompute:
        if not any(fnmatchcase(name, pattern) for name in blocks):
            raise ConfigError(
                f"model.recompute: no block of the model is called {pattern!r}; it has {first_few(blocks, most=8)}"
            )
    return [name for name in blocks if any(fnmatchcase(name, pattern) for pattern in wanted.recompute)]


def parts_to_compile(module: nn.Module, blocks: Sequence[str], settings: Compile) -> Sequence[nn.Module]:
    """Return the modules that are compiled each; raise ConfigError for a backend or blocks that do not exist."""
    known = torch.compiler.list_backends(exclude_tags=())
    if settings.backend not in known:
        raise ConfigError(f"model.compile.backend: there is no {settings.backend!r}; torch knows {', '.join(known)}")
    if settings.what == "blocks" and not blocks:
        raise ConfigError(
            "model.compile: blocks compiles block by block, and the model has no blocks: name them in "
            "model.blocks or in the task's blocks(), or set model.compile: model"
        )
    return [module.get_submodule(name) for name in blocks] if settings.what != "model" and blocks else [module]


def _convert_batchnorms(module: nn.Module) -> None:
    """Replace every BatchNorm by SyncBatchNorm, whose statistics cover the microbatches of all ranks."""
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if converted is not module:
        raise ConfigError(
            "model.sync_batchnorm: true replaces every BatchNorm in the model, and the model is one: put it into a "
            "torch.nn.Sequential"
        )
    if not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ConfigError("model.sync_batchnorm: true, and the model has no BatchNorm: leave it out")


def _recompute_forward(block: nn.Module, *, selective: bool) -> None:
    """Make a block recompute its forward during backward, with the same random numbers."""
    inner = [block.forward]
    norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = (
            create_selective_checkpoint_contexts(list(OPERATIONS_SAVED))
            if selective
            else (nullcontext(), nullcontext())
        )
        further = [surrounding() for surrounding in SURROUNDINGS]
        further += [_freeze_running_stats(norms)] if norms else []
        return first, _enter_all([again, *further]) if further else again

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner[0](*args, **kwargs)
        own: dict[str, Any] = {"context_fn": contexts} if selective or norms or SURROUNDINGS else {}
        return checkpoint(inner[0], *args, use_reentrant=False, **own, **kwargs)

    forward.__dict__.update(unipar_inner=inner, unipar_recomputes=True)  # an engine may wrap what is recomputed
    block.forward = forward


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Generator[None]:
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


@contextmanager
def _freeze_running_stats(norms: Sequence[_NormBase]) -> Generator[None]:
    """Context manager: keep running statistics unchanged, so that a recomputed batch does not count twice."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, tracked in before:
            norm.momentum, norm.num_batches_tracked = momentum, tracked
