"""Swapping to the disk under stage 3: files that a rank writes, and buffers on the host through which they pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Final, final

from unipar.errors import Unsupported
from unipar.prediction.timeline import Term
from unipar_deepspeed.prediction.zero_model import MASTER_BYTES, ZeroModel, partition_of, sub_groups

ALIGNED_BYTES: Final = 1024
"""Bytes of which a file's size is a multiple (`AIO_ALIGNED_BYTES`, with one thread)."""

SWAPPED_BYTES: Final = 2**20
"""Bytes of the smallest tensor that goes to the disk (`MIN_AIO_BYTES`, and `block_size`); unipar sets neither."""

OPTIMIZER_BUFFERS: Final = 4
"""Buffers for masters, gradients and moments of a sub-group (`buffer_count`); unipar does not set it."""

PARAMETER_BUFFERS: Final = 5
"""Buffers for partitions of parameters (`buffer_count`); unipar does not set it."""

BUFFER_ELEMENTS: Final = 100_000_000
"""Elements of each of them (`buffer_size`); unipar does not set it."""

IN_MEMORY: Final = 1_000_000_000
"""Elements of a rank's parameters that stay in the host's memory (`max_in_cpu`); unipar does not set it."""


def aligned_bytes(elements: int, element: int) -> int:
    """Return the bytes of a tensor's file, or of its place in a buffer."""
    return ceil(elements * element / ALIGNED_BYTES) * ALIGNED_BYTES


def is_swapped(model: ZeroModel, members: Sequence[int]) -> bool:
    """Return whether masters and moments of a sub-group are in files: it is large enough."""
    elements = sum(partition_of(model, number) for number in members)
    return model.optimizer_on_disk and elements * MASTER_BYTES >= SWAPPED_BYTES


def swapped_numbers(model: ZeroModel) -> frozenset[int]:
    """Return the parameters whose masters and moments are in files."""
    return frozenset(number for members in sub_groups(model) if is_swapped(model, members) for number in members)


def swapped_states(model: ZeroModel, members: Sequence[int], name: str) -> Iterator[Term]:
    """Yield the files of a sub-group: its master, its moments, and each large gradient for the update."""
    elements = sum(partition_of(model, number) for number in members)
    size, timeline = aligned_bytes(elements, MASTER_BYTES), model.timeline
    yield Term("masters", f"{name}, partition, master", size, place="disk")
    for number, _ in enumerate(model.parameters[members[0]].states, 1):
        yield Term("optimizer", f"{name}, partition {number}", size, place="disk")
    for number in members:
        if timeline.has_gradient(number) and (written := _written_gradient(model, number)):
            yield Term("gradients", f"{model.parameters[number].name}, gradient", written, place="disk")


def _written_gradient(model: ZeroModel, number: int) -> int:
    """Return the bytes of a gradient's file: a rest that is no multiple stays in memory."""
    size = partition_of(model, number) * MASTER_BYTES
    return size // ALIGNED_BYTES * ALIGNED_BYTES if size >= SWAPPED_BYTES else 0


def kept_gradient(model: ZeroModel, number: int) -> int:
    """Return the bytes of a gradient on the GPU that stay to the update, as not all of it goes to the disk."""
    size = partition_of(model, number) * MASTER_BYTES
    return 0 if size == _written_gradient(model, number) else size


def optimizer_buffers(model: ZeroModel) -> Iterator[Term]:
    """Yield the buffers through which masters, gradients and moments pass; raise Unsupported if they are too few."""
    states = max((len(model.parameters[number].states) for number in model.trained), default=0)
    if 1 + states + 1 > OPTIMIZER_BUFFERS:
        raise Unsupported(
            "deepspeed/parameters",
            [
                f"options.deepspeed.offload_optimizer: disk: DeepSpeed has {OPTIMIZER_BUFFERS} buffers for a master, "
                f"its gradient and the optimizer's states, and this optimizer has {states} states; say cpu"
            ],
        )
    largest = max(sum(partition_of(model, number) for number in members) for members in sub_groups(model))
    for number in range(1, OPTIMIZER_BUFFERS + 1):
        name = f"swap buffer {number} of the optimizer"
        yield Term("communication", name, aligned_bytes(largest, MASTER_BYTES), place=model.home)


def parameter_buffers(model: ZeroModel) -> Iterator[Term]:
    """Yield the buffers into which partitions of parameters are read."""
    size = PARAMETER_BUFFERS * aligned_bytes(BUFFER_ELEMENTS, model.element)
    yield Term("communication", "swap buffers of parameters", size, place=model.host)


@final
@dataclass(frozen=True)
class SwappedParameters:
    """Partitions of parameters of which some are on the disk, and the others in the host's memory."""

    model: ZeroModel

    @cached_property
    def _flat(self) -> tuple[tuple[int, frozenset[int]], ...]:
        """Elements that the host keeps of each of the optimizer's groups, and the parameters that are in them."""
        flat_tensors: list[tuple[int, frozenset[int]]] = []
        before = 0
        for members in self.model.groups:
            elements = sum(partition_of(self.model, number) for number in members)
            place = min(elements, max(0, IN_MEMORY - before))
            before += elements
            inside, end = set[int](), 0
            for part in sub_groups(self.model, [members]):
                end += sum(partition_of(self.model, number) for number in part)
                if end <= place:
                    inside.update(part)
            flat_tensors.append((place, frozenset(inside)))
        return tuple(flat_tensors)

    @cached_property
    def in_memory(self) -> frozenset[int]:
        """Trained parameters whose partitions are in the host's flat tensors."""
        return frozenset[int]().union(*(inside for _, inside in self._flat))

    @cached_property
    def read(self) -> frozenset[int]:
        """Parameters whose partitions are read whenever they are gathered."""
        written = {n for n in range(len(self.model.parameters)) if self._bytes(n) >= SWAPPED_BYTES}
        return frozenset(written - self.in_memory)

    def _bytes(self, number: int) -> int:
        return partition_of(self.model, number) * self.model.element_of(number)

    def terms(self) -> Iterator[Term]:
        """Yield the files, the buffers, and what is in memory; raise Unsupported for too large a partition."""
        model = self.model
        for number, p in enumerate(model.parameters):
            if (elements := partition_of(model, number)) > BUFFER_ELEMENTS:
                raise Unsupported(
                    "deepspeed/parameters",
                    [
                        f"options.deepspeed.offload_parameters: disk: a rank's part of {p.name} has {elements:,} "
                        f"elements, and DeepSpeed's buffers {BUFFER_ELEMENTS:,}; take more ranks, or say cpu"
                    ],
                )
            if self._bytes(number) >= SWAPPED_BYTES:  # also of those that are then kept in memory
                yield Term("parameters", p.name, aligned_bytes(elements, model.element_of(number)), place="disk")
            elif number not in self.in_memory:
                small = p.numel <= model.persistence
                size = self._bytes(number) if small else model.pinned(self._bytes(number))
                yield Term("parameters", p.name, size, place="device" if small else model.host)
        for i, (place, _) in enumerate(self._flat):
            size = model.pinned(place * model.element)
            yield Term("parameters", f"group {i}, partitions", size, place=model.host)
        yield from parameter_buffers(model)
        if not self.in_memory.issuperset(model.trained):
            largest = max(sub_groups(model), key=lambda part: sum(partition_of(model, n) for n in part))
            # of whole parameters: DeepSpeed takes the sizes of the parameters for those of their partitions
            size = sum(aligned_bytes(model.parameters[number].numel, model.element) for number in largest)
            yield Term("communication", "swap buffer for updated parameters", size, place=model.host)


@final
class SwapReads:
    """Partitions that are read from the disk as they are needed, and ahead of that, each into a buffer of its own."""

    def __init__(self, model: ZeroModel, numbers: Collection[int]) -> None:
        """`numbers`: parameters whose partitions are read."""
        self._model, self._away = model, set(numbers)
        self._coming: set[int] = set()
        self._there: set[int] = set()

    def is_away(self, number: int) -> bool:
        """Return whether a parameter would have to be read before it is gathered."""
        return number in self._away

    @property
    def _free(self) -> int:
        return PARAMETER_BUFFERS - len(self._coming) - len(self._there)

    def need(self, numbers: Iterable[int]) -> None:
        """Read what is not there, and wait for what is being read; raise Unsupported if there are too few buffers."""
        wanted = set(numbers)
        missing = wanted & self._away
        if len(missing) > self._free:
            raise Unsupported(
                "deepspeed/parameters",
                [
                    f"options.deepspeed.offload_parameters: disk: DeepSpeed has {PARAMETER_BUFFERS} buffers, and "
                    f"{len(missing) + PARAMETER_BUFFERS - self._free} parameters that are read from the disk are "
                    "whole at once, where it ends with an error; lower options.deepspeed.prefetch and reuse, or say cpu"
                ],
            )
        if missing or wanted & self._coming:
            self._there |= missing | self._coming
            self._away -= missing
            self._coming.clear()

    def ahead(self, queue: Sequence[int], gathering: int) -> None:
        """Begin to read what is used next; `gathering`: elements of parameters that are being gathered."""
        considered, begun = 0, set[int]()
        for number in queue:
            if considered > 2 * gathering or len(begun) >= self._free:
                break
            if number in begun:
                raise Unsupported(
                    "deepspeed/parameters",
                    [
                        f"options.deepspeed.offload_parameters: disk: {self._model.parameters[number].name} is used "
                        "twice within what DeepSpeed reads ahead, where it ends with an error; say cpu"
                    ],
                )
            if number in self._away:
                begun.add(number)
            considered += self._model.parameters[number].numel
        self._away -= begun
        self._coming |= begun

    def let_go(self, number: int) -> None:
        """Free the buffer of a parameter that is no longer whole, or stays whole for good."""
        if number in self._there:
            self._there.remove(number)
            self._away.add(number)
