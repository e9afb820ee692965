"""`unipar plan`: cells on numbers of ranks, a limit, and refusals; as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unipar
from unipar.cli.commands.config.plan import read_ranks, read_share, read_size
from unipar.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "task": {
        "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
        "args": {"layers": 2, "width": 16, "heads": 2, "context": 8},
    },
    "device": "cpu",
    "batch": {"total": 8, "micro": 2},
    "train": {"steps": 1},
}


@pytest.fixture(scope="module")
def planned() -> Any:
    return unipar.plan(
        CONFIG, cells=["single", "native/*", "deepspeed/gradients"], worlds=[1, 2, 3], memory=200_000, headroom=0.1
    )


def test_each_cell_on_each_number_of_ranks(planned: Any) -> None:
    """One process is planned once; a world that does not divide the batch is told, and the others are planned."""
    rows = {(row.cell, row.ranks): row for row in planned.rows}
    assert [ranks for cell, ranks in rows if cell == "single"] == [1]
    assert [ranks for cell, ranks in rows if cell == "native/parameters"] == [1, 2, 3]
    assert rows["native/nothing", 3].refusal == (
        "batch.total (8) is not a multiple of micro x data (2 x 3 = 6); the nearest totals are 6 and 12"
    )
    states = {ranks: rows["deepspeed/gradients", ranks].phases[-1].held["optimizer"] for ranks in (1, 2)}
    assert states == {1: 65_024, 2: 32_512}
    assert rows["native/nothing", 2].micro == 2
    held = rows["native/nothing", 2].phases[-1].held
    assert held["optimizer"] == 2 * held["parameters"] == 2 * held["gradients"]
    assert rows["native/parameters", 2].phases[-1].held["optimizer"] < 0.6 * held["optimizer"]


def test_the_largest_microbatch_that_fits(planned: Any) -> None:
    """Of those that divide a rank's share of the batch, which stays."""
    assert planned.limit == 180_000
    rows = {(row.cell, row.ranks): row for row in planned.rows if not row.refusal}
    one, two = rows["native/nothing", 1], rows["native/parameters", 2]
    assert (one.largest, two.largest) == (1, 4)
    assert one.peak.peak > 180_000 > two.peak.peak
    more = unipar.plan(CONFIG, cells=["native/nothing"], worlds=[1], memory=200_000 + one.peak.peak)
    assert more.rows[0].largest == 8


def test_a_table_of_eighty_columns(planned: Any) -> None:
    """Categories, whether it fits, and what the numbers are."""
    lines = planned.table(80).splitlines()
    assert lines[0].split() == [
        *("cell", "ranks", "micro", "peak", "in", "param", "grad", "optim", "comm", "activ", "temp", "fits"),
        *("largest", "micro"),
    ]
    assert any(line.startswith("native/parameters") and " yes " in line for line in lines)
    assert any("parameters; planned in" in line for line in lines)
    assert lines[-1].startswith("fits: at most 195 KiB less 10%; largest micro:")


def test_as_json(planned: Any) -> None:
    """All phases, each with its largest terms by name."""
    rows = json.loads(planned.as_json())["rows"]
    (row,) = (row for row in rows if (row["cell"], row["ranks"]) == ("native/parameters", 2))
    assert [phase["phase"] for phase in row["phases"]] == ["forward", "backward", "update", "steady"]
    assert all(sum(phase["held"].values()) == phase["peak"] for phase in row["phases"])
    assert row["phases"][0]["largest"][0]["category"] in ("activations", "communication")


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("700B", 700)]
)
def test_sizes(text: str, size: int) -> None:
    """Powers of two and of ten."""
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["80Gib", "80", "GiB", "-1GiB", "0GiB", "80 GiB x"])
def test_sizes_that_are_none(text: str) -> None:
    """They are refused with an example."""
    with pytest.raises(ConfigError, match=r"^--memory .*: 80GiB$"):
        read_size(text)


def test_shares_and_ranks() -> None:
    """In per cent or as a fraction; whole numbers."""
    assert (read_share("5%"), read_share("0.1"), read_share("0%"), read_ranks("64")) == (0.05, 0.1, 0.0, 64)
    with pytest.raises(ConfigError) as share:
        read_share("120%")
    assert str(share.value) == "--headroom 120%: a share is from 0% to less than 100%: 5%, or 0.05"
    with pytest.raises(ConfigError) as ranks:
        read_ranks("0")
    assert str(ranks.value) == "--world: '0' is no number of ranks; say for example --world 1,8,64"
