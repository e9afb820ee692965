"""Attentions of a model's blocks, and which way of `parallel.context` each takes, for `unipar explain --deep`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from unipar.backend import Part, resources
from unipar.config import Config
from unipar.utils.text import count_of
from unipar_mesh.context.head_exchange import bytes_beside_gathering, why_no_exchange
from unipar_mesh.look_at_model import kind_of_block
from unipar_mesh.options import options_of
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.tensor_model import block_calls

_ELEMENT_SIZES = {"fp64": 8, "fp32": 4}
"""Bytes of an element of queries, by precision; of all others 2."""


@final
class _HeadsSeen(TorchFunctionMode):
    """Mode that notes the heads of queries and keys of each attention within a sequence, and its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions: list[tuple[int, int, float]] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._note(*args[:5], **(kwargs or {}))
        elif func is F.multi_head_attention_forward:  # which calls its inner attention where no mode sees it
            self.attentions.append((args[4], args[4], args[10] if (kwargs or {}).get("training", True) else 0.0))
        return func(*args, **(kwargs or {}))

    def _note(
        self, query: Tensor, key: Tensor, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **_: Any
    ) -> None:
        if query.shape[-2] == key.shape[-2]:
            heads, key_heads = (query.shape[-3], key.shape[-3]) if query.dim() == 4 else (1, 1)
            self.attentions.append((heads, key_heads, dropout_p))


def describe_attentions(part: Part, config: Config) -> Iterator[str]:
    """Yield a sentence for each kind of attention: what ulysses sends beside gather, and so what auto takes.

    Where the config says ulysses, those that it cannot do; where it says another way, nothing.
    """
    way = options_of(config).attention
    if way not in ("auto", "ulysses"):
        return
    assert part.loss is not None
    assert part.sample is not None
    model, ranks = meta_block(part.module), config.parallel.context
    kinds: dict[Any, list[str]] = {}
    for name in part.blocks:
        kinds.setdefault(kind_of_block(model.get_submodule(name)), []).append(name)
    calls = block_calls(model, part.blocks, [names[0] for names in kinds.values()], part.loss, part.sample())
    size = _ELEMENT_SIZES.get(config.train.precision, 2)
    on_cpu = resources.choose_device(config)[0] == "cpu"
    auto = "auto is" if on_cpu else "auto is torch's ring where it can do it, else"
    for first, *others in kinds.values():
        if first not in calls:
            continue
        args, kwargs = meta_arguments(*calls[first])
        with torch.no_grad(), _HeadsSeen() as seen:
            model.get_submodule(first)(*args, **kwargs)
        where = f"{first}{f' and {len(others)} more' if others else ''}"
        for heads, key_heads, dropout in dict.fromkeys(seen.attentions):
            if way == "auto":
                yield f"attention of {where}: {auto} {_describe(heads, key_heads, ranks, size, dropout)}"
            elif why := why_no_exchange(heads, ranks):
                yield f"attention of {where}: ulysses cannot do it: {why}; say gather or ring"


def _describe(heads: int, key_heads: int, ranks: int, element_size: int, dropout: float) -> str:
    if dropout:
        return f"gather: it has dropout ({dropout:g})"
    if why := why_no_exchange(heads, ranks):
        return f"gather: {why}"
    share = bytes_beside_gathering(heads, key_heads, ranks, element_size)
    words = f"{count_of(heads, 'head')} of queries and {key_heads} of keys on {count_of(ranks, 'rank')}"
    return f"{'ulysses' if share < 1 else 'gather'}: with {words} ulysses sends {share:.2f} times the bytes of gather"
