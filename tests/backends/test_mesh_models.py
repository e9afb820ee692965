"""Models that others wrote in strategies with axes: the table of `make mesh`, and, as a sweep, all of its rows."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override
from unipar_mesh.tensor.sites import BLOCK, frames_to, run_block, site_of
from unipar_mesh.trials_without_trace import unchanged

from benchmarks.drawn_models import FAMILIES, FROZEN, HEADS, Draw
from benchmarks.mesh import (
    DRAWN_STRATEGIES,
    SUBJECTS,
    Row,
    drawn_subjects,
    main,
    missing_library,
    page_rows,
    row_of_verdict,
    rows_of,
    shared_server,
    with_rows_of_page,
    written,
)
from unipar.results.verdicts import Finding, Verdict

TENSOR, PIPELINE, CONTEXT = (f"native/nothing+{axis}2" for axis in ("tensor", "pipeline", "context"))


@pytest.mark.parametrize(
    ("verdict", "says", "good"),
    [
        (Verdict(strategy=TENSOR, outcome="agrees", digits=6, share=0.51), "6 digits, 0.51 of allowed", True),
        (
            Verdict(strategy=TENSOR, outcome="agrees", share=0.2, bits="shares"),
            "same bits, 0.20 of allowed; bit for bit the replay",
            True,
        ),
        (
            Verdict(strategy=TENSOR, outcome="refused", note="parallel.tensor: 2 would split nothing of this model"),
            "refused: parallel.tensor: 2 would split nothing of this model",
            True,
        ),
        (
            Verdict(
                strategy=TENSOR, outcome="failed", note="rank 1 failed\n  TaskError: split as planned, another\n  log"
            ),
            "refused: split as planned, another",
            True,
        ),
        (Verdict(strategy=TENSOR, outcome="failed", note="IndexError: 3"), "FAILED: IndexError: 3", False),
        (Verdict(strategy=TENSOR, outcome="waits"), "FAILED: random data", False),
        (
            Verdict(
                strategy=TENSOR, outcome="disagrees", share=9.0, finding=Finding(step=1, what="loss", kind="stale")
            ),
            "DISAGREES: stale",
            False,
        ),
    ],
)
def test_a_row_tells_a_refusal_from_a_failure(verdict: Verdict, says: str, good: bool) -> None:
    """A sentence that says why a model cannot be split is an answer; any other end is not."""
    row = row_of_verdict("gpt", verdict, "random data")
    assert (row.says, row.good) == (says, good)


def test_the_page_quotes_each_refusal_once() -> None:
    """A model a line, a strategy a column, a table for each set of strategies; what was not run is a dash."""
    rows = [
        Row("t5", TENSOR, True, False, "6 digits, 0.51 of allowed"),
        Row("t5", PIPELINE, False, True, "refused: a skip"),
        Row("bert", PIPELINE, False, True, "refused: a skip"),
        Row("llama-ring", CONTEXT, True, False, "same bits, 0.21 of allowed"),
    ]
    table = page_rows(rows)
    assert table.splitlines() == [
        f"| model | `{TENSOR}` | `{PIPELINE}` |",
        "|---|---|---|",
        "| `t5` | 6 digits, 0.51 | (1) |",
        "| `bert` | - | (1) |",
        "",
        f"| model | `{CONTEXT}` |",
        "|---|---|",
        "| `llama-ring` | same bits, 0.21 |",
        "",
        "1. refused: a skip",
    ]


def test_written_rows_replace_those_of_the_same_model_and_strategy() -> None:
    """All others stay, refusals too, and stand where they stand if all are written at once."""
    old = [
        Row("bert", TENSOR, True, False, "6 digits, 0.30"),
        Row("bert", PIPELINE, False, True, "refused: a skip. It goes on"),
        Row("llama-ring", CONTEXT, True, False, "same bits, 0.21"),
    ]
    new = [Row("bert", TENSOR, False, True, "refused: no cut"), Row("gpt2", PIPELINE, True, False, "7 digits, 0.10")]
    page = f"a\n<!-- table -->\n{page_rows(old)}\n<!-- end -->\nb\n"
    rows = [new[1], new[0], *old[1:]]
    assert with_rows_of_page(page, new) == rows
    assert written(page, page_rows(rows)) == f"a\n<!-- table -->\n{page_rows(rows)}\n<!-- end -->\nb\n"


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With those that exist."""
    with pytest.raises(SystemExit):
        main(["gtp2"])
    assert "gtp2: the models are gpt, gpt2, llama, bert, t5, vit, encoder," in capsys.readouterr().err


class Wrapped(nn.Module):
    """Block of a library that wraps the forward of each subclass, as transformers does to recompute it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        plain: Any = cls.forward

        def wrapper(self: Any, *args: Any) -> Any:
            return plain(self, *args)

        cls.forward = wrapper


class Sited(Wrapped):
    """Block that tells where a call of its forward is made."""

    @override
    def forward(self) -> str:
        return site_of(torch.add, frames_to(BLOCK), {id(self): "block"})


def test_a_call_is_found_again_after_fully_shard() -> None:
    """That gives the block another class, whose forward is wrapped once more: the place of a call is the same."""
    block: Any = Sited()
    before = run_block(block, (), {})
    block.__class__ = type("FSDPSited", (Sited,), {})
    assert before.startswith("block|")
    assert before.count("wrapper") == 1
    assert run_block(block, (), {}) == before


REFUSED = {
    "t5": ["native/nothing+context2"],
    "translator": ["native/nothing+context2"],
    "gptoss": ["native/nothing+context2+expert2"],
    "mixtral-auxiliary": ["native/nothing+pipeline2+expert2"],
}
"""Strategies that refuse a model."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(SUBJECTS))
def test_models_in_all_strategies(name: str) -> None:
    """Every strategy agrees with one process, or says why it cannot be: these."""
    if missing_library(SUBJECTS[name]) is not None:
        pytest.skip("peft is not installed")
    with shared_server([SUBJECTS[name]]):
        rows = list(rows_of(name, SUBJECTS[name], list(SUBJECTS[name].strategies)))
    assert [row.says for row in rows if not row.good] == []
    assert [row.strategy for row in rows if row.refused] == REFUSED.get(name, [])


DRAWN = drawn_subjects(1, 20)


def test_a_seed_draws_models_of_every_kind() -> None:
    """The same ones each time, by another seed others; of each kind, head and frozen part there are some."""
    draws = [Draw.of(1, number) for number in range(20)]
    assert str(draws[3]) == (
        "Bert 3 x 48; mean of first token; unused head; frozen: all but norms and biases; sgd, clip 1.0"
    )
    assert str(Draw.of(2, 3)) != str(draws[3])
    assert {draw.kind for draw in draws} == {*FAMILIES}
    assert {draw.head for draw in draws} == {*HEADS}
    assert {draw.frozen for draw in draws} == {*FROZEN}
    assert {draw.layers for draw in draws} == {1, 2, 3, 4}


@pytest.fixture(scope="module")
def drawn_server() -> Generator[None]:
    """One process that has imported all that these models need."""
    with shared_server(list(DRAWN.values())):
        yield


@pytest.mark.sweep
@pytest.mark.usefixtures("drawn_server")
@pytest.mark.parametrize("name", list(DRAWN))
def test_drawn_models(name: str) -> None:
    """Both strategies agree with one process; a model of a single block is refused as a pipeline of two stages."""
    rows = list(rows_of(name, DRAWN[name], DRAWN_STRATEGIES))
    assert [row.says for row in rows if not row.good] == []
    draw = Draw.of(1, int(name.partition(":")[0]))
    one_block = draw.layers == 1 and draw.kind != "encoder-decoder"
    assert [row.strategy for row in rows if row.refused] == ([PIPELINE] if one_block else [])


class HooksAtFirstCall(nn.Linear):
    """A layer that registers a hook in its first call and remembers that in an attribute, as transformers does."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            self.register_forward_hook(lambda module, given, out: None)
            self.hooked = True
        return super().forward(input)


def test_a_trial_leaves_no_hooks() -> None:
    """A hook that a trial's call registers is gone with the attribute that says so; else each trial adds one."""
    layer = HooksAtFirstCall(2, 2)
    for _ in range(2):
        with unchanged(layer, lambda model, batch: model(batch)):
            layer(torch.ones(2))
    hooks: Any = layer._forward_hooks  # pyright: ignore[reportPrivateUsage]
    assert (len(hooks), hasattr(layer, "hooked")) == (0, False)
    layer(torch.ones(2))
    assert len(hooks) == 1
