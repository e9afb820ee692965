"""Ledgers of ranks that do not see rank 0's run folder: rank 0 gets theirs, and they get rank 0's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unipar.run_folder.layout import ledger_path
from unipar.utils.files import write_file_atomically

if TYPE_CHECKING:
    import torch.distributed as dist

    from unipar.distributed.world import World

_PART_BYTES: Final = 2**22
"""Bytes of a value: the store takes no more than 8 MiB at once."""


def exchange_ledgers(world: World, run: Path, apart: Sequence[int]) -> None:
    """Write the ledgers of the ranks `apart` to rank 0's run folder, and rank 0's to theirs; all ranks call this."""
    assert world.store is not None
    key, rank = world.key("ledgers"), world.rank
    if rank == 0 or rank in apart:
        _send(world.store, f"{key}/{rank}", ledger_path(run, rank).read_bytes())
    if rank == 0:
        for other in apart:
            _write(run, other, _receive(world.store, f"{key}/{other}"))
    elif rank in apart and world.machines.leads(rank):
        _write(run, 0, _receive(world.store, f"{key}/0"))


def _write(run: Path, rank: int, content: bytes) -> None:
    write_file_atomically(ledger_path(run, rank), content.decode("utf-8"))


def _send(store: dist.Store, key: str, content: bytes) -> None:
    parts = [content[i : i + _PART_BYTES] for i in range(0, len(content), _PART_BYTES)]
    for i, part in enumerate(parts):
        store.set(f"{key}/{i}", part)  # pyright: ignore[reportArgumentType] - bytes are taken as they are
    store.set(f"{key}/parts", str(len(parts)))


def _receive(store: dist.Store, key: str) -> bytes:
    return b"".join(store.get(f"{key}/{i}") for i in range(int(store.get(f"{key}/parts"))))
