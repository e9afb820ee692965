"""Recipes for large models, and the peaks that others have published."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recipes import __main__ as tables
from benchmarks.recipes.planned import PRETRAINING, TUNING, PlannedRecipe, PublishedPeak, published_peaks
from unipar.backend.offered_strategies import expand_strategy_patterns
from unipar.config.config_source import load_config_file

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))

PLANNED = PlannedRecipe(
    "small_full", 8, "native/parameters", dict.fromkeys(tables.COLUMNS, 2**30), 5 * 2**30, 0.5, 65_536.0, ""
)
PUBLISHED = PublishedPeak("small", "https://example.org", "8 GPUs", "10.0 GiB", "allocated")


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_can_be_planned_on_its_gpus(file: Path) -> None:
    """Its task is there, its strategies exist, its batch divides, and a comment says what to change first."""
    text = file.read_text("utf-8")
    assert text.startswith("# yaml-language-server: $schema=../../docs/config.schema.json\n")
    assert "\n# Change first: " in text.partition("\n\n")[0]
    config = load_config_file(file).config
    assert config.task is not None
    assert Path(str(config.task.use).partition(":")[0]) == ROOT / "examples" / "public_model.py"
    assert expand_strategy_patterns(config.compare.strategies)
    worlds = PRETRAINING if file.stem.startswith("pretrain") else TUNING
    assert all(config.batch.settle(ranks).total % ranks == 0 for ranks in worlds)


def test_a_third_of_the_published_peaks_is_set_aside_by_a_seed() -> None:
    """Each has a source, a setting and a unit; those without a plan say why."""
    rows = published_peaks()
    names = [row.name for row in rows if "added" not in row.differences]
    assert len(names) == len(set(names)) == 22
    assert {row.name for row in rows if row.set_aside} == set(random.Random(44).sample(names, 7))
    assert all(row.source.startswith("https://") and row.setting and row.bytes > 2**30 for row in rows)
    assert all(row.reason for row in rows if row.plan is None)


def test_a_recipe_is_a_row() -> None:
    """With GiB by column, its speed, and what would have to change."""
    one, other = tables.recipe_table([PLANNED, replace(PLANNED, seconds=None, to_fit="fits on 16 ranks")]).splitlines()[
        2:
    ]
    assert one == "| small_full | 8 | native/parameters | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 | 5.0 | 500 ms | 65,536 | yes |"
    assert other.endswith("| 5.0 |  |  | fits on 16 ranks |")


def test_a_published_peak_is_a_row() -> None:
    """With the plan, its difference, and why it differs."""
    far = replace(PUBLISHED, set_aside=True, reason="other kernels", differences="compiled")
    one, other, none = tables.published_table(
        [(PUBLISHED, 9 * 2**30), (far, 12 * 2**30), (PUBLISHED, None)]
    ).splitlines()[2:]
    assert one == "| [small](https://example.org): 8 GPUs | allocated | 10.0 | 9.0 | -10.0% |  |  |"
    assert other.endswith("| 12.0 | +20.0% | yes | other kernels; compiled |")
    assert none.endswith("| 10.0 |  |  |  |  |")


def test_a_plan_that_is_far_off_needs_a_reason() -> None:
    """Beyond 15 % on either side, or if there is none."""
    sizes = [None, 8.4, 8.6, 11.4, 11.6]
    assert [tables.far(PUBLISHED, None if size is None else int(size * 2**30)) for size in sizes] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_tables_are_put_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else of the page stays."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- recipes -->\nold\n<!-- end -->\nb\n", "utf-8")
    monkeypatch.setattr(tables, "PAGE", page)
    tables.write_tables({"recipes": "new \\1"})
    assert page.read_text("utf-8") == "a\n<!-- recipes -->\n\nnew \\1\n<!-- end -->\nb\n"


def test_tokens_of_a_file_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that do not fill a row are left out."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from public_model import PublicModel  # pyright: ignore[reportMissingImports]

    file = tmp_path / "tokens.bin"
    file.write_bytes(torch.arange(10, dtype=torch.int32).numpy().tobytes())
    rows = PublicModel("llama", {}, 4, str(file)).data()
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("lora", [0, 2])
def test_logits_in_chunks_have_the_loss_of_all(monkeypatch: pytest.MonkeyPatch, lora: int) -> None:
    """And its gradients, also of adapters."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "public_model", raising=False)
    from public_model import PublicModel  # pyright: ignore[reportMissingImports]

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}

    def trained(chunks: int) -> tuple[float, list[Any]]:
        torch.manual_seed(0)
        task = PublicModel("llama", sizes, 16, lora=lora, targets=["q_proj"], chunks=chunks)
        model: Any = task.model()
        model.float()
        batch = torch.arange(32).view(2, 16) % 50
        loss = task.loss(model, batch)
        loss.backward()
        return float(loss.detach()), [p.grad for p in model.parameters() if p.grad is not None]

    (whole, expected), (parts, found) = trained(1), trained(3)
    assert parts == pytest.approx(whole, rel=1e-6)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_are_cut_from_a_file_of_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row has as many tokens as `length` says; tokens at the end that fill no row are left out."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from public_model import PublicModel  # pyright: ignore[reportMissingImports]

    (tmp_path / "tokens.bin").write_bytes(torch.arange(10, dtype=torch.int32).numpy().tobytes())
    task: Any = PublicModel("llama", {}, 3, tokens=str(tmp_path / "tokens.bin"))
    assert [row.tolist() for row in task.data()] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
