"""`unipar plan` of examples whose models are of transformers and peft, which draw, convert and freeze parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unipar
from unipar.config.config_source import load_config_file

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

CONFIGS = Path(__file__).parents[2] / "configs"
VIT = {"size": 8, "patch": 4, "hidden": 16, "layers": 2, "heads": 2}
LORA = {"hidden": 16, "layers": 2, "heads": 2, "context": 16, "words": 512, "rank": 2}
PLAIN = ("single", "native/nothing", "native/parameters", "deepspeed/gradients", "accelerate/parameters")
SPLIT = ("native/nothing+tensor2", "native/nothing+pipeline2", "native/nothing+context2")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's file lies in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def planned(name: str, sizes: dict[str, Any], strategies: tuple[str, ...]) -> Any:
    config = load_config_file(CONFIGS / f"{name}.yaml", overrides={"task.args": sizes}).config
    return unipar.plan(config, strategies=strategies, worlds=[1, 2])


@pytest.mark.parametrize(
    ("name", "sizes", "parameters", "kept"),
    [
        ("vit", VIT, 7_130, (7_130 * 4, 7_130 * 8)),
        ("lora", LORA, 23_176, (22_032 * 2 + 1_144 * 4, 1_144 * 8)),  # frozen in bf16, trained in fp32
    ],
)
def test_examples_of_transformers_and_peft(
    name: str, sizes: dict[str, Any], parameters: int, kept: tuple[int, int]
) -> None:
    """Every strategy that splits no sample is planned; frozen weights stay in bf16, without gradient or state."""
    plan = planned(name, sizes, PLAIN)
    rows = {row.strategy: row for row in plan.rows if not row.refusal}
    assert set(rows) == {*PLAIN}
    steady = rows["single"].phases[-1].held
    assert (plan.parameters, plan.allocated) == (parameters, 0)
    assert (steady["parameters"], steady["optimizer"]) == kept
    assert rows["native/parameters"].phases[-1].held["parameters"] < 0.6 * kept[0]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "sizes"), [("vit", VIT), ("lora", LORA)])
def test_examples_along_further_axes(name: str, sizes: dict[str, Any]) -> None:
    """Tensor, pipeline and context are planned too, on two ranks."""
    rows = [row for row in planned(name, sizes, SPLIT).rows if row.ranks == 2]
    assert [(row.strategy, row.refusal) for row in rows] == [(strategy, "") for strategy in SPLIT]
