"""Inside a world of two: a backend's options, one after another, each with a new engine."""

from __future__ import annotations

import json
import socket
import warnings
from pathlib import Path

import torch

from tests.conformance import tasks
from tests.conformance.cases import Case
from tests.conformance.inside import attempt
from unipar import registry
from unipar.beat import Heart, beat_of
from unipar.config import Cell, Config
from unipar.place import Place


def case_of(row: dict[str, object]) -> Case:
    """A model with two groups, two microbatches; `row` says what is special."""
    given = {key: value for key, value in row.items() if key not in ("cell", "name")}
    return Case(str(row["name"]), tasks.Grouped, **given)  # pyright: ignore[reportArgumentType]


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Plays the rows of RUN/rows.json in one world, which the first row's backend joins."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = json.loads((folder / "rows.json").read_text("utf-8"))
    first: Config = case_of(rows[0]).config(Cell.parse(rows[0]["cell"]), place.size)
    world = registry.load(first.backend).join(first, place)
    heart = Heart(beat_of(folder, place.rank))
    for i, row in enumerate(rows):
        torch.save(
            attempt(case_of(row), Cell.parse(row["cell"]), world, folder, heart), folder / f"{i}-{place.rank}.pt"
        )
        world.barrier()
    world.close()
