"""`make examples`: what it verifies, and its table."""

from __future__ import annotations

import pytest

from benchmarks.examples import EXAMPLES, SMALL, examples_table, main
from benchmarks.mesh import Row


def test_what_is_verified() -> None:
    """Every example's config but those for `unipar plan`, and all that have a smaller form."""
    assert {"causal_lm", "char_gpt", "diffusion", "digits", "distillation", "gan", "lora", "vit"} <= {*EXAMPLES}
    assert not {"gpt_7b", "llama_7b", "llama_70b", "quickstart"} & {*EXAMPLES}
    assert SMALL.keys() <= {*EXAMPLES}


def test_the_table_of_the_page() -> None:
    """A strategy a line, an example a column; a refusal is a number, explained once below."""
    rows = [
        Row("one", "native/nothing", True, False, "7 digits, 0.24 of allowed; bit for bit the replay"),
        Row("one", "native/nothing+dp", False, True, "refused: device: cpu"),
        Row("two", "native/nothing", True, False, "same bits, 0.00 of allowed"),
        Row("two", "native/nothing+dp", False, True, "refused: device: cpu"),
        Row("two", "horovod/nothing", False, False, "FAILED: it hung"),
    ]
    assert examples_table(rows).splitlines() == [
        "| strategy | one | two |",
        "|---|---|---|",
        "| `native/nothing` | 7 digits, replay | same bits |",
        "| `native/nothing+dp` | (1) | (1) |",
        "| `horovod/nothing` | - | DISAGREES or FAILED |",
        "",
        "1. refused: device: cpu",
    ]


def test_an_unknown_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The names that there are."""
    with pytest.raises(SystemExit):
        main(["gan", "gnu"])
    assert f"error: gnu: the examples are {', '.join(EXAMPLES)}" in capsys.readouterr().err
