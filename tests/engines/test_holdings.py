"""What each engine keeps, as it says itself: bytes by category, to the byte."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.holdings_inside import REPLAY
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.backend import registry
from unipar.launcher.processes.group import WorkerGroup

pytestmark = pytest.mark.forked

ALL, TRAINED = 1_245_440, 1_179_904
"""The model's parameters, and those that are trained."""

Bytes = tuple[float, float, float, float, float]
"""For each parameter: parameters, masters, optimizer; gradients before the update and after it."""

WHOLE, BUCKETS = (4, 0, 8, 4, 0), (4, 0, 8, 4, 4)
FSDP2, FSDP2_HALF = (4, 0, 8, 4, 0), (2, 0, 4, 2, 0)
HELD: dict[str, tuple[Bytes, Bytes]] = {  # in worlds of one and of two
    "native/nothing fp32": (BUCKETS, BUCKETS),
    "native/optimizer fp32": (BUCKETS, (4, 0, -8, 4, 4)),
    "native/gradients fp32": (FSDP2, FSDP2_HALF),
    "native/parameters fp32": (FSDP2, FSDP2_HALF),
    "native/optimizer bf16-master": (FSDP2, FSDP2_HALF),
    "native/gradients bf16-master": (FSDP2, FSDP2_HALF),
    "native/parameters bf16-master": (FSDP2, FSDP2_HALF),
    "accelerate/nothing fp32": (BUCKETS, BUCKETS),
    "accelerate/gradients fp32": (FSDP2, FSDP2_HALF),
    "accelerate/parameters bf16-master": (FSDP2, FSDP2_HALF),
    "deepspeed/nothing fp32": (WHOLE, WHOLE),
    "deepspeed/nothing bf16-master": ((2, 4, 8, 2, 0), (2, 4, 8, 2, 0)),
    "deepspeed/optimizer fp32": ((4, 4, 8, 4, 0), (4, 2, 4, -4, 0)),
    "deepspeed/optimizer bf16-master": ((2, 4, 8, 2, 0), (2, 2, 4, -2, 0)),
    "deepspeed/gradients fp32": ((4, 4, 8, 4, 0), (4, 2, 4, -4, 0)),
    "deepspeed/gradients bf16-master": ((2, 4, 8, 2, 0), (2, 2, 4, -2, 0)),
    "deepspeed/parameters fp32": ((4, 4, 8, 4, 4), (2, 2, 4, 2, 2)),
    "deepspeed/parameters bf16-master": ((2, 4, 8, 2, 2), (1, 2, 4, 1, 1)),
    "accelerate/optimizer+zero fp32": ((4, 4, 8, 4, 0), (4, 2, 4, -4, 0)),
    "horovod/nothing fp32": (WHOLE, WHOLE),
}
OWNED = (655_360, 524_544)
"""A minus above: ZeroRedundancyOptimizer gives each rank the states of whole parameters, of so many elements."""

PARTLY = (655_616, 786_432)
"""A minus above: ZeRO-1 and -2 keep whole gradients of all parameters of which a rank owns a part: so many elements."""

MORE: list[tuple[str, str, int]] = [
    ("native/nothing", "fp32", 2),
    ("native/optimizer", "bf16-master", 2),
    ("native/gradients", "bf16-master", 1),
    ("deepspeed/optimizer", "fp32", 2),
]
HOROVOD: list[tuple[str, str, int]] = [("horovod/nothing", "fp32", 1)]
ROWS: list[tuple[str, str, int]] = [
    ("accelerate/optimizer+zero", "fp32", 1),  # it joins: all others but Horovod can be in its world
    *(
        (strategy, precision, 1)
        for strategy, precision in map(str.split, HELD)
        if not strategy.startswith(("accelerate/o", "horo"))
    ),
    *MORE,
]
IN_ONE = ("native/nothing fp32", "native/parameters fp32", "native/gradients bf16-master", "deepspeed/parameters fp32")
"""Rows of HELD that are played in a world of one whenever tests run; the others there are in the sweeps."""

ALONE: list[tuple[str, str, int]] = [("single", "fp32", 1), (REPLAY, "fp32", 2)]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, int, int], Ranks]:
    """What each rank of each world said, by strategy, precision, microbatches and the world's size."""
    asked = {item.name.partition("[")[2] for item in request.session.items}
    in_one = [row for row in ROWS if row in (ROWS[0], *MORE) or f"{row[0]} {row[1]}-1]" in asked]
    horovod = [row for row in HOROVOD if f"{row[0]} {row[1]}-1]" in asked]
    found: dict[tuple[str, str, int, int], Ranks] = {}
    for size, rows in ((1, in_one + ALONE), (2, ROWS), *([(1, HOROVOD)] if horovod else []), (2, HOROVOD)):
        if any(
            registry.why_not_installed(registry.find_backend(name))
            for name in {"deepspeed", "accelerate"}
            if rows is not HOROVOD
        ):
            rows = [row for row in rows if row[0].startswith(("native", "single", REPLAY))]
        if rows is HOROVOD and registry.why_not_installed(registry.find_backend("horovod")):
            continue
        run = tmp_path_factory.mktemp("holdings")
        (run / "rows.json").write_text(json.dumps(rows), "utf-8")
        with WorkerGroup(
            run, size, "tests.support.holdings_inside:run", environment=PYTHONPATH_VARIABLE, heartbeat=100.0
        ) as workers:
            workers.wait()
        ranks = [json.loads((run / f"{rank}.json").read_text("utf-8")) for rank in range(size)]
        found |= {(*row, size): [rank[i] for rank in ranks] for i, row in enumerate(rows)}
    return found


def _of(played: dict[tuple[str, str, int, int], Ranks], strategy: str, precision: str, micros: int, size: int) -> Ranks:
    if (strategy, precision, micros, size) not in played:
        pytest.skip("its library is not installed")
    return played[strategy, precision, micros, size]


@pytest.mark.parametrize(
    ("row", "size"),
    [
        pytest.param(row, size, marks=[pytest.mark.sweep] * (size == 1 and row not in IN_ONE))
        for row in HELD
        for size in (1, 2)
    ],
)
def test_bytes_a_parameter(played: Any, row: str, size: int) -> None:
    """Parameters, masters, states and gradients of each strategy, between backward and update and between two steps."""
    strategy, precision = row.split()
    parameters, masters, optimizer, before, after = HELD[row][size - 1]
    zero = strategy.startswith("deepspeed/") or strategy.endswith("+zero")
    steps = 4 if zero and strategy != "deepspeed/nothing" else 24  # one flat group, or six tensors
    for rank, said in enumerate(_of(played, strategy, precision, 1, size)):
        states = optimizer * TRAINED + steps if optimizer > 0 else -optimizer * OWNED[rank] + 12
        partly = -before * PARTLY[rank]
        for phase, gradients in (("update", before * TRAINED if before > 0 else partly), ("rest", after * TRAINED)):
            held = {"masters": 0, "gradients": 0} | said["seen"][phase]
            assert held["parameters"] == parameters * ALL
            assert held["masters"] == masters * TRAINED
            assert held["optimizer"] == states
            assert held["gradients"] == gradients, phase
            assert held["buffers"] == (768 if precision == "bf16-master" else 1280)


@pytest.mark.parametrize("size", [1, 2])
def test_what_communication_keeps(played: Any, size: int) -> None:
    """ZeRO-3 keeps its bucket and one small parameter gathered; FSDP2 what is gathered until its backward."""
    for said in _of(played, "deepspeed/parameters", "fp32", 1, size):
        assert said["seen"]["rest"]["communication"] == 77_840 * 4 + 256 * 4
    for said in _of(played, "native/gradients", "bf16-master", 1, size):
        assert [phase.get("communication") for phase in said["seen"].values()] == [None, ALL * 2, None, None]
    for said in _of(played, "native/parameters", "fp32", 1, size):
        assert all("communication" not in phase for phase in said["seen"].values())


@pytest.mark.parametrize("size", [1, 2])
def test_between_two_microbatches(played: Any, size: int) -> None:
    """DDP keeps gradients beside its buckets; ZeRO-1 and FSDP2 without sync keep them whole."""
    ddp = [said["seen"] for said in _of(played, "native/nothing", "fp32", 2, size)]
    assert [seen["forward"]["gradients"] for seen in ddp] == [8 * TRAINED] * size
    assert [seen["update"]["gradients"] for seen in ddp] == [4 * TRAINED] * size
    whole = [said["seen"]["forward"] for said in _of(played, "native/optimizer", "bf16-master", 2, size)]
    assert [(seen["gradients"], seen["communication"]) for seen in whole] == [(4 * TRAINED, 2 * ALL)] * size
    zero = [said["seen"]["forward"] for said in _of(played, "deepspeed/optimizer", "fp32", 2, size)]
    assert [(seen["gradients"], seen["communication"]) for seen in zero] == [(4 * TRAINED, 77_840 * 4)] * size


def test_one_process(played: Any) -> None:
    """Without a wrapper; and a replay keeps the gradients of the ranks that it has played."""
    [single], [replay] = _of(played, "single", "fp32", 1, 1), _of(played, REPLAY, "fp32", 2, 1)
    kept = {"parameters": 4 * ALL, "optimizer": 8 * TRAINED + 24, "buffers": 1280}
    gradients = {"gradients": 4 * TRAINED}
    assert single["seen"] == {"forward": kept, "backward": kept, "update": kept | gradients, "rest": kept}
    assert replay["seen"]["forward"] == kept | gradients
    assert replay["seen"]["rest"] == kept


def test_asking_changes_nothing(played: Any) -> None:
    """The same losses to the last bit, whether it is asked at every mark or never; the same list twice."""
    assert len(played) >= 2
    for row, ranks in played.items():
        for said in ranks:
            assert (row, said["losses"], said["steady"]) == (row, said["unasked"], True)


def test_names(played: Any) -> None:
    """Parameters and their states are called as the model calls them, a tied weight by its first name."""
    [single] = _of(played, "single", "fp32", 1, 1)
    assert single["listed"][:3] == [["parameters", "gain"], ["parameters", "embed.weight"],
                                    ["parameters", "blocks.0.up.weight"]]  # fmt: skip
    assert ["optimizer", "embed.weight.exp_avg"] in single["listed"]
    assert single["listed"][-2:] == [["buffers", "shift"], ["buffers", "plain"]]
    assert not any("head" in name for _, name in single["listed"])


MOVED = {"to_accumulated_grad_if_needed": "_set_unsharded_grad_dtypes"}
"""Functions that a newer torch has under another name: one of the two is there."""


@pytest.mark.parametrize("name", ["native", "deepspeed", "horovod", "accelerate"])
def test_sites_are_there(name: str) -> None:
    """Each place that is named exists in the library as it is installed: the file, and the function in it."""
    backend = registry.find_backend(name)
    if why := registry.why_not_installed(backend):
        pytest.skip(why)
    assert backend.capabilities.sites
    missing: set[str] = set()
    functions: dict[str, set[str]] = {}
    for site in backend.capabilities.sites:
        path, _, function = site.partition(":")
        if path not in functions:
            library = find_spec(path.partition("/")[0])
            assert library is not None
            assert library.origin is not None
            tree = ast.parse((Path(library.origin).parents[1] / path).read_text("utf-8"))
            functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if function not in functions[path]:
            missing.add(function)
    either = {old if old in missing else new for old, new in MOVED.items() if {old, new} & missing}
    assert missing == either
