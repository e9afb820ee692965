"""Check of a model whose embedding and head a script cuts over the words: all else leaves their parameters alone."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from unipar.backend import Part
from unipar_mesh.tensor.sites import BLOCK, frames_to, line_of
from unipar_mesh.tensor.vocabulary import Vocabulary


def refused_vocabulary(part: Part, batch: Any, vocabulary: Vocabulary) -> list[str]:
    """Return sentences on why a script cannot cut the words of a model, whose loss is run on a batch."""
    assert part.loss is not None
    table: Any = part.module.get_submodule(vocabulary.embedding)
    own = type(table).forward is not nn.Embedding.forward or "forward" in vars(table)
    if own or set(table._parameters) != {"weight"}:
        return [
            f"options.native.vocabulary: {vocabulary.embedding} is a {type(table).__name__}, which reads words in a "
            "way of its own, and a script cuts a plain nn.Embedding: leave the option out of the export"
        ]
    watch = _Watch(part.module, (vocabulary.embedding, vocabulary.head))
    try:
        with torch.random.fork_rng([]), torch.no_grad(), watch:
            part.loss(part.module, batch)
    finally:
        for handle in watch.handles:
            handle.remove()
    return [*dict.fromkeys(watch.reasons)]


@final
class _Watch(TorchFunctionMode):
    """Mode that notes each use of some modules' parameters outside of these modules."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self.handles: list[Any] = []
        self._inside = False
        self._names: dict[int, str] = {}
        for name in names:
            module = model.get_submodule(name)
            for key, p in module.named_parameters():
                self._names.setdefault(id(p), f"{name}.{key}")
            self.handles.append(module.register_forward_pre_hook(self._enter))
            self.handles.append(module.register_forward_hook(self._leave))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside = True

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._inside = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if not self._inside and name not in ("dtype", "device", "requires_grad"):
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and id(x) in self._names:
                    module = self._names[id(x)].rpartition(".")[0]
                    self.reasons.append(
                        f"options.native.vocabulary: {self._names[id(x)]} is used outside of {module} "
                        f"({name} at {line_of(frames_to(BLOCK))}), where a rank has some of its words only: call "
                        f"{module} instead, or leave the option out of the export"
                    )
        return func(*args, **kwargs)
