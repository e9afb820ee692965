"""Sketches of tensors, hashes of tensors and samples, fingerprints of batches."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from unipar.backend import Region
from unipar.engines.batch_transfer import map_tensors

SKETCH_NUMBERS = 8
"""Number of sums in a sketch."""


@final
class TensorSketcher:
    """Maker of linear sketches: each element, multiplied by a fixed random sign, is added to one of a few sums.

    The sketch of a sum is the sum of the sketches, also over ranks that hold a region each. The norm of a sketch is
    about that of the tensor. So the change of a tensor in a step can be measured later without keeping the tensor.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._signs: dict[tuple[str, int, Region, torch.device], Tensor] = {}

    def sketch_region(self, name: str, numel: int, where: Region, tensor: Tensor) -> Tensor:
        """Return the sketch of `tensor`, the region `where` of a tensor `name` that has `numel` elements in all."""
        signed = tensor.detach().reshape(-1).double() * self._sign(name, numel, where, tensor.device)
        if where.runs > 1:
            buckets = element_numbers(where, 0, where.numel, signed.device) % SKETCH_NUMBERS
            return signed.new_zeros(SKETCH_NUMBERS).index_add_(0, buckets, signed).cpu()
        front = where.start % SKETCH_NUMBERS
        back = -(front + signed.numel()) % SKETCH_NUMBERS
        return torch.nn.functional.pad(signed, (front, back)).view(-1, SKETCH_NUMBERS).sum(0).cpu()

    def _sign(self, name: str, numel: int, where: Region, device: torch.device) -> Tensor:
        key = (name, numel, where, device)
        if key in self._signs:
            return self._signs[key]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randint(0, 2, (numel,), dtype=torch.int8, generator=generator)
        signs = (where.of(full).reshape(-1) * 2 - 1).to(device)
        if self._keep:
            self._signs[key] = signs
        return signs


def sketch_whole_tensor(sketches: TensorSketcher, name: str, tensor: Tensor) -> Tensor:
    """Return the sketch of a tensor that this rank holds as a whole."""
    return sketches.sketch_region(name, tensor.numel(), Region(0, tensor.numel()), tensor)


MOST_UNITS = 512
"""Slices of a stacked parameter that are sketched apart, at most."""


def sketch_units(
    sketches: TensorSketcher, name: str, shape: Sequence[int], where: Region, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the units of a region of a parameter: its slices if it is stacked, else all of it, with their sketches.

    Equal units have equal sketches, whatever their names are: `up[0]`, `up[1]`.
    """
    if where.runs > 1:
        return
    count = shape[0] if len(shape) == 3 and shape[0] <= MOST_UNITS else 1
    size, flat = torch.Size(shape).numel() // max(count, 1), tensor.detach().reshape(-1)
    at, end = where.start, where.start + where.length
    while at < end:
        unit, inside = divmod(at, size)
        length = min(size - inside, end - at)
        part = flat[at - where.start : at - where.start + length]
        yield f"{name}[{unit}]", sketches.sketch_region("", size, Region(inside, length), part)
        at += length


def collect_tensors(value: Any) -> list[Tensor]:
    """Return all tensors in `value` (a tensor, or containers of tensors), in order."""
    tensors: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    map_tensors(value, note)
    return tensors


_ELEMENTS_PER_CHUNK = 1 << 18
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK_64_BITS = (1 << 64) - 1


def element_numbers(where: Region, first: int, last: int, device: torch.device) -> Tensor:
    """Return the numbers, in the whole tensor, of a region's elements from the `first` to before the `last`."""
    numbers = torch.arange(first, last, device=device)
    if where.runs == 1:
        return numbers + where.start
    return where.start + numbers // where.length * where.stride + numbers % where.length


def hash_tensor_region(tensor: Tensor, where: Region) -> int:
    """Return the hash of a region of a tensor; its sum over all regions depends on all bits only."""
    t = tensor.detach().reshape(-1)
    if t.is_complex():
        t = torch.view_as_real(t).reshape(-1)
        where = Region(2 * where.start, 2 * where.length, 2 * where.stride, where.runs)
    bits = t.view(_INTEGER_DTYPES[t.element_size()])
    total = 0
    for start in range(0, len(bits), _ELEMENTS_PER_CHUNK):
        part = bits[start : start + _ELEMENTS_PER_CHUNK].to(torch.int64)
        places = element_numbers(where, start, start + len(part), part.device)
        mixed = (part + places * 0x9E3779B97F4A7C1) * 0x2545F4914F6CDD1D
        total += int(((mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85).sum())
    return total & _MASK_64_BITS


def hash_sample_keys(keys: Iterable[tuple[int, int]]) -> int:
    """Return a hash of a set of samples that does not depend on their order; hashes of several ranks can be added."""
    return sum(hash(key) for key in keys) & _MASK_64_BITS


def fingerprint_batch(batch: Any) -> str:
    """Return a fingerprint that is equal for equal batches in any precision; "" if the batch has no readable tensor."""
    tensors = [t for t in collect_tensors(batch) if t.layout == torch.strided and not t.is_nested]
    if not tensors:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for t in tensors:
        digest.update(repr(tuple(t.shape)).encode())
        digest.update(_fingerprint_bytes(t.detach()))
    return digest.hexdigest()


def _fingerprint_bytes(t: Tensor) -> bytes:
    if t.is_complex():
        t = torch.view_as_real(t)
    if t.is_floating_point():
        t = t.to(torch.bfloat16).view(torch.int16)
    return np.ascontiguousarray(t.cpu().numpy()).tobytes()
