"""Training mode of a model before its first step: which modules are put into it, and which stay in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unipar.utils.text import count_of, first_few

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainingModes:
    """Modules that were put into training mode, and modules that are in evaluation mode."""

    woken: tuple[str, ...] = ()
    """Names of the modules on which train() was called; "" is the model itself."""

    changed: int = 0
    """Number of modules that were in evaluation mode before that, and are not now."""

    staying: tuple[str, ...] = ()
    """Names of the outermost modules that are in evaluation mode."""

    left: int = 0
    """Number of modules that are in evaluation mode, those inside others included."""

    trained: tuple[str, ...] = ()
    """Names of those that have a trained parameter themselves."""

    def describe(self) -> str:
        """Return the modes as a sentence; "" if model() returned all modules in training mode."""
        sentences: list[str] = []
        if self.changed:
            sentences.append(f"{count_of(self.changed, 'module')} that model() returned in eval mode")
        if self.left:
            stays = f"{self.left} {'stay' if self.left > 1 else 'stays'} in eval mode"
            names = first_few([name or "the model" for name in self.staying])
            which = f"not frozen: {first_few(self.trained)}" if self.trained else f"all frozen: {names}"
            sentences.append(f"{stays}, {which}")
        return "; ".join(sentences)


def enter_training_mode(module: nn.Module, *, keep: bool = False) -> TrainingModes:
    """Put a model into training mode if model() left it in evaluation mode, as from_pretrained does; return the modes.

    A frozen module inside a model in training mode stays as it is, and so does a single layer without modules inside:
    a teacher, a BatchNorm whose statistics are fixed. `keep`: all modules stay as they are.
    """
    before = sum(not inner.training for inner in module.modules())
    in_eval = [] if keep or not before else [*_outermost_in_eval(module)]
    woken = tuple(name for name, inner in in_eval if not name or _is_trained_model(inner))
    for name in woken:
        module.get_submodule(name).train()
    inside = {name: inner for name, inner in module.named_modules() if not inner.training}
    return TrainingModes(
        woken=woken,
        changed=before - len(inside),
        staying=tuple(name for name, _ in _outermost_in_eval(module)),
        left=len(inside),
        trained=tuple(name for name, m in inside.items() if any(p.requires_grad for p in m.parameters(recurse=False))),
    )


def _outermost_in_eval(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in evaluation mode that are in no other such module, with their names."""
    if not module.training:
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _outermost_in_eval(inner, f"{name}.{child}" if name else child)


def _is_trained_model(module: nn.Module) -> bool:
    """Return whether a module has modules inside and something that is trained."""
    return any(True for _ in module.children()) and any(p.requires_grad for p in module.parameters())
