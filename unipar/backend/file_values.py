"""Values of a parameter that are still in a file: engines read them when they place it, each rank its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor

    from unipar.backend.engine import Region

_ATTRIBUTE = "unipar_file_values"


class FileValues(Protocol):
    """Tensor in a file."""

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
    """Have a parameter on the meta device get its values from a file when it is placed."""
    setattr(p, _ATTRIBUTE, values)


def file_values(p: Tensor) -> FileValues | None:
    """Return where a parameter's values are read from; None if it has them, or gets them from rank 0."""
    return getattr(p, _ATTRIBUTE, None)
