"""`run.whole`: a split model gathered once, for code that calls it as often as it likes, such as `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import nn

from unipar.backend import Engine
from unipar.config import Config
from unipar.distributed.device import available_bytes, has_own_memory
from unipar.distributed.world import World
from unipar.errors import TaskError
from unipar.training.evaluating.evaluation import refuse_unsynced_evaluation
from unipar.utils.procfs import memory_left
from unipar.utils.text import format_size

WHOLE_CALL = "run.whole()"
"""Name of the call in errors."""


class WholeRun(Protocol):
    """Part of a run that the gathering of a model needs."""

    done: int
    world: World
    config: Config

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        ...

    def mark(self, phase: str) -> None:
        """Set the phase of the heartbeat."""
        ...

    def note(self, event: str, **fields: Any) -> None:
        """Write an event into this rank's run log."""
        ...


@final
class GatheredModel:
    """Gathering of a run's model, or of one of its parts, between two steps.

    `engine_of` returns the engine of a part, or of the first; `is_busy`, whether a step or an evaluation is under way.
    """

    def __init__(self, engine_of: Callable[[str | None], Engine], is_busy: Callable[[], bool]) -> None:
        self._engine_of, self._is_busy = engine_of, is_busy
        self.is_open = False
        """Whether parameters are gathered now."""

    def refuse(self, call: str) -> None:
        """Raise TaskError if parameters are gathered now: some ranks would wait in collectives for the others."""
        if self.is_open:
            raise TaskError(
                f"{call} was called inside `with {WHOLE_CALL}`, where parameters are gathered: leave the block first"
            )

    @contextmanager
    def gather(self, part: str | None, run: WholeRun) -> Generator[nn.Module]:
        """Context manager: the model with all its parameters on every rank; all ranks enter and leave it together."""
        if self._is_busy():
            raise TaskError(f"{WHOLE_CALL} was called inside a step or an evaluation: call it between two steps")
        self.refuse(WHOLE_CALL)
        if (axes := run.config.parallel.axes).split:
            raise TaskError(
                f"{WHOLE_CALL}: parallel has {axes}, which splits blocks in place, so that no rank can have the whole "
                "model; evaluate by metrics(), which runs the split model, or train without these axes"
            )
        if (between := run.config.train.local_steps) and run.done != run.steps:
            refuse_unsynced_evaluation(run.done, between, WHOLE_CALL)
        engine = self._engine_of(part)
        needed = engine.whole_bytes()
        check_room(*_tables(needed, run.world), rank=run.world.rank, device=str(run.world.device))
        run.mark("evaluate")
        engine.share_buffers()
        began = time.perf_counter()
        with engine.whole() as model:
            run.note("whole", step=run.done, bytes=needed, seconds=time.perf_counter() - began)
            self.is_open = True
            try:
                yield model
            finally:
                self.is_open = False
        run.mark("between")


def _tables(needed: int, world: World) -> tuple[list[int], list[int]]:
    """Return how many bytes each rank needs, and how many it has free."""
    table = torch.zeros((2, world.size), dtype=torch.float64, device=world.device)
    table[0, world.rank], table[1, world.rank] = needed, _free_bytes(world)
    needs, free = world.sum(table).tolist()
    return [int(n) for n in needs], [int(n) for n in free]


def _free_bytes(world: World) -> int:
    """Return the bytes that this rank may still take: on the CPU its share of what the machine has left."""
    if has_own_memory(world.device):
        return available_bytes(world.device)
    return memory_left() // max(1, world.place.local_size)


def check_room(needs: Sequence[int], free: Sequence[int], *, rank: int, device: str) -> None:
    """Raise TaskError on all ranks if any has no room for the parameters that it does not hold."""
    short = [i for i, (need, left) in enumerate(zip(needs, free, strict=True)) if need > left]
    if not short:
        return
    worst = rank if rank in short else short[0]
    raise TaskError(
        f"{WHOLE_CALL}: the parameters of the whole model take {format_size(needs[worst])} besides what rank {worst} "
        f"holds, and {format_size(free[worst])} are free there ({device}); evaluate by metrics(), which runs the split "
        "model, or generate elsewhere from the weights that `unipar checkpoint export` writes"
    )
