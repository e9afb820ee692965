"""Updates of some elements at a time, for optimizers whose update needs tensors of its own."""

from __future__ import annotations

from typing import Final

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
