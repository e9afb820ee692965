"""`ObservedLibrary`: what unipar knows of a library in whose scripts it observes a training (`unipar observe`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unipar.backend.engine import Category, Holding

if TYPE_CHECKING:
    from torch import nn

TrainingFault = Literal[
    "unequal copies",
    "unequal initial weights",
    "unequal microbatches",
    "unreduced gradients",
    "update without effect",
    "weights outside the optimizer",
    "coarse dtype",
    "schedule too fast",
    "same batches",
    "repeated order",
    "same dropout",
    "unsynced batch norm",
    "no group",
]
"""Faults that an observed training can have without an error."""


class ObservedLibrary:
    """Knowledge about one library; the base class says nothing."""

    name: ClassVar[str] = ""
    """Name that users have for it."""

    module: ClassVar[str] = ""
    """Module whose import says that a script uses it."""

    wrappers: ClassVar[Mapping[str, str]] = {}
    """Names that users have for its wrappers, by the class of a model or an optimizer."""

    sites: ClassVar[Mapping[str, Category]] = {}
    """Category of what its functions allocate: end of `path:function` -> category."""

    ways_out: ClassVar[Mapping[TrainingFault, str]] = {}
    """Advice to its user about a fault."""

    def place(self) -> tuple[int, int] | None:
        """Return rank and number of ranks, if the library knows them and torch.distributed does not."""
        return None

    def sends(self) -> AbstractContextManager[Mapping[str, int]] | None:
        """Return a context manager that yields the bytes that the library sends meanwhile, by collective.

        None: all that it sends goes through torch.distributed.
        """
        return None

    def holdings(self, model: nn.Module) -> Iterable[Holding] | None:
        """Return what a model that the library wraps keeps, or None if it is not the library's."""
        return None

    def norm_before_clip(self, model: nn.Module) -> float | None:
        """Return the gradient norm of the last update as the library has computed it, or None."""
        return None

    def config_of(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return the library's config of a model that it wraps, as `unipar import` reads it, or None without one."""
        return None
