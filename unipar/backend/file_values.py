"""Values that a parameter does not have yet: engines ask for them when they place it, each rank for its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor

    from unipar.backend.engine import Region

_ATTRIBUTE = "unipar_file_values"


class FileValues(Protocol):
    """Source of a parameter's values, such as a tensor in a file."""

    def read_into(self, where: Region, out: Tensor) -> None:
        """Fill a contiguous tensor, which may have another dtype and device, with elements in their order."""
        ...


@final
class RestoredValues(FileValues):
    """Values that a checkpoint gives a parameter once its engine is built; it is zero until then."""

    @override
    def read_into(self, where: Region, out: Tensor) -> None:
        out.zero_()


def set_file_values(p: Tensor, values: FileValues) -> None:
    """Have a parameter on the meta device get its values from this source when it is placed."""
    setattr(p, _ATTRIBUTE, values)


def file_values(p: Tensor) -> FileValues | None:
    """Return the source of a parameter's values; None if it has them, or gets them from rank 0."""
    return getattr(p, _ATTRIBUTE, None)
