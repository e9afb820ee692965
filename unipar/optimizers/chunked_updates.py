"""Updates of some elements at a time, for optimizers whose update needs tensors of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

_ON_CPU: Final = 2**16
"""Elements that are updated at once on the CPU: what they need fits its caches."""

_ELSEWHERE: Final = 2**22
"""The same elsewhere, where many small kernels take longer than few large ones."""


class InPieces:
    """Base of optimizers that update some elements of a tensor after another."""

    piece: int | None = None
    """Elements that are updated at once; None: as many as suit the device."""

    def elements_at_once(self, device: str) -> int:
        """Return how many elements are updated at once on a type of device."""
        return self.piece or (_ON_CPU if device == "cpu" else _ELSEWHERE)


def split_in_pieces(tensors: Sequence[Tensor], most: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield parts of tensors that are laid out alike, this many elements at a time, each with where it begins.

    Tensors that are not contiguous come whole.
    """
    if not all(t.is_contiguous() for t in tensors):
        yield 0, list(tensors)
        return
    flat = [t.view(-1) for t in tensors]
    size = flat[0].numel()
    for first in range(0, size, most):
        yield first, [t[first : min(first + most, size)] for t in flat]
