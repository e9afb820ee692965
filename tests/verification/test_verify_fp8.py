"""`unipar verify` with `train.precision: fp8`: every library that carries it, and layers that leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.verifications import verified

pytestmark = pytest.mark.forked

TASK = "tests.support.stacked:Stacked"
LAYERS = "blocks.*.qkv, blocks.*.out, blocks.*.up, blocks.*.down"
SOME = ("native/parameters", "deepspeed/parameters", "accelerate/nothing", "horovod/nothing", "native/nothing+tensor2")
MORE = (
    *("native/nothing", "native/optimizer", "native/gradients", "native/nothing+pipeline2"),
    *("deepspeed/nothing", "deepspeed/optimizer", "deepspeed/gradients"),
    *("accelerate/gradients", "accelerate/parameters"),
)


@pytest.mark.parametrize(
    ("precision", "strategies"),
    [
        ("fp8", SOME),
        pytest.param("fp8", MORE, marks=pytest.mark.sweep),
        pytest.param("fp8-rowwise", (*SOME, *MORE, "native/nothing+context2"), marks=pytest.mark.sweep),
    ],
    ids=["each", "tensorwise", "rowwise"],
)
def test_every_library_multiplies_in_fp8(
    forks: Forks, tmp_path: Path, precision: str, strategies: tuple[str, ...]
) -> None:
    """They agree with one process, to the bit where no rank has a part of a product; the verdict says what
    multiplied in which layers, and how many digits that costs."""
    more = ["--set", f"train.precision={precision}"]
    done, said = verified(forks, tmp_path, TASK, strategies, steps=3, backend="toy", more=more, width=32)
    assert {row["strategy"]: row["outcome"] for row in said["strategies"]} == dict.fromkeys(strategies, "agrees")
    alike = [row["strategy"] for row in said["strategies"] if row["bits"]]
    assert alike == [strategy for strategy in strategies if strategy.partition("+")[2] in ("", "pipeline2")]
    recipe = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}[precision]
    (remark,) = (remark for remark in said["remarks"] if remark.startswith("fp8"))
    beginning = f"fp8 ({recipe}, emulated in fp32) in 16 linear layers, {LAYERS}: the losses of one process agree with "
    assert remark.startswith(beginning + "those of one process, fp64 to ")
    assert 1 <= int(remark.split()[-2]) <= 4
    assert done.returncode == 0


def test_a_layer_that_leaves_fp8_is_found_and_named(forks: Forks, tmp_path: Path) -> None:
    """Be it before the first step, or later: the strategy fails, although its losses are near."""
    strategies = ("faulty/nothing", "faulty/nothing+first-left-fp8", "faulty/nothing+late-left-fp8")
    more = ["--set", "train.precision=fp8"]
    done, said = verified(forks, tmp_path, TASK, strategies, steps=4, backend="faulty", more=more, width=32)
    rows = {row["strategy"]: row for row in said["strategies"]}
    assert [rows[strategy]["outcome"] for strategy in strategies] == ["agrees", "failed", "failed"]
    assert rows[strategies[1]]["note"] == (
        "train.precision: fp8, and 1 linear layer did not multiply in fp8: blocks.1.up has become a Linear; call each "
        "layer itself, under the run's autocast, or take bf16-mixed"
    )
    assert rows[strategies[2]]["note"] == (
        "multiplied in fp8 in one process, and not here: blocks.0.down has become a Linear"
    )
    assert done.returncode == 1
