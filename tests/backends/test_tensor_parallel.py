"""Blocks cut over the ranks of a tensor group, beside the whole blocks: results, gradients, masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tensor_worlds import NEAR, said_in_world

pytestmark = [pytest.mark.forked, pytest.mark.filterwarnings("ignore")]  # torch's own, while it is imported


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "own"),
        pytest.param(2, "sdpa", marks=pytest.mark.sweep),
        pytest.param(2, "eager", marks=pytest.mark.sweep),
        pytest.param(4, "own", marks=pytest.mark.sweep),
        pytest.param(4, "sdpa", marks=pytest.mark.sweep),
        pytest.param(4, "eager", marks=pytest.mark.sweep),
    ],
)
def test_parts_compute_the_whole(ranks: int, kind: str, tmp_path: Path) -> None:
    """Outputs, all gradients and the generator's state are those of the whole block, in training (with dropout),
    evaluation, with recomputing, and on a batch of another shape than the plan was derived on."""
    blocks = said_in_world(tmp_path, ranks, kind)
    expected = {
        "own": {
            "char_gpt": 4,
            "nanogpt": 4,
            "nanogpt slow": 4,
            "odd": 7,
            "unequal": 4 if ranks == 2 else 2,  # four ranks do not divide its two key heads
            "lora": 16,
            "timm": 4,
            "torch": 4,
            "torch masked": 4,
            "torch decoder": 6,
        }
    }.get(
        kind,
        {
            "gpt2": 4,
            "llama": 7 if ranks == 2 else (5 if kind == "eager" else 3),
            "qwen3": 7 if ranks == 2 else (5 if kind == "eager" else 3),
            "bert": 6,
            "vit": 6,
            "t5 encoder 0": 6,
            "t5 encoder 1": 6,
            "t5 decoder 0": 10,
            "t5 decoder 1": 10,
        },
    )
    for said in blocks:
        assert {name: values["cuts"] for name, values in said.items()} == expected
        off = {
            f"{name}: {way}": value
            for name, values in said.items()
            for way, value in values.items()
            if way != "cuts" and (value is False or (value is not True and value > NEAR))
        }
        assert off == {}
