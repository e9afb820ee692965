"""RunLogs of ranks that do not see rank 0's run folder: rank 0 gets theirs, and they get rank 0's."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unipar.distributed.meeting.text_rounds import open_rounds
from unipar.run_folder.layout import run_log_path
from unipar.utils.files import write_file_atomically

if TYPE_CHECKING:
    from unipar.distributed.world import World

MOST_RUN_LOGS: Final = 256
"""Ranks of the largest world of which rank 0 gets all run logs; of a larger one, those of each machine's first rank."""


def exchange_run_logs(world: World, run: Path, remote_ranks: Collection[int]) -> None:
    """Write the run logs of `remote_ranks` to rank 0's run folder, and rank 0's to theirs; all ranks call this.

    They go over the links between the machines: rank 0 sends its own to few of them, which pass it on.
    """
    rank, leads = world.rank, world.machines.leads(world.rank)
    sends = rank in remote_ranks and (leads or world.size <= MOST_RUN_LOGS)

    def judge(texts: list[str]) -> str:
        for other, packed in enumerate(texts):
            if packed:
                _write(run, other, packed)
        return _packed(run, 0)

    answer = open_rounds(world, world.key("run_logs"))(_packed(run, rank) if sends else "", judge)
    if rank in remote_ranks and leads:
        _write(run, 0, answer)


def _packed(run: Path, rank: int) -> str:
    return b64encode(zlib.compress(run_log_path(run, rank).read_bytes())).decode()


def _write(run: Path, rank: int, packed: str) -> None:
    write_file_atomically(run_log_path(run, rank), zlib.decompress(b64decode(packed)).decode("utf-8"))
