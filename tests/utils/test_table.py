"""Tables in plain text: long names of strategies go on in further lines where the table is too wide."""

from __future__ import annotations

import pytest

from unipar.utils.table import format_table_rows

HEADER = ("strategy", "loss", "step ms")
LONG = "native/parameters+pipeline2+tensor2+context2+sequence+gpipe"


def lines(*rows: tuple[str, ...], width: int, fold: bool = True) -> list[str]:
    return [line for block in format_table_rows(HEADER, rows, right=(2,), width=width, fold=fold) for line in block]


def test_a_long_name_goes_on_below() -> None:
    """A name breaks before a plus, figures stay on its first line, and columns are aligned below one another."""
    assert lines(("native/nothing", "7 digits", "200"), (LONG, "6 digits", "1000"), width=50) == [
        "strategy                      loss      step ms",
        "native/nothing                7 digits      200",
        "native/parameters+pipeline2   6 digits     1000",
        "  +tensor2+context2+sequence",
        "  +gpipe",
    ]


def test_a_sentence_wraps_beside_a_long_name() -> None:
    """Both go on in the same lines."""
    refused = (LONG, "refused: the model has two blocks, and each stage needs one")
    assert lines(("native/nothing", "7 digits", "200"), refused, width=50)[2:] == [
        "native/parameters+pipeline2   refused: the model",
        "  +tensor2+context2+sequence  has two blocks, and",
        "  +gpipe                      each stage needs one",
    ]


@pytest.mark.parametrize(("width", "fold"), [(90, True), (50, False)])
def test_a_table_with_room_is_not_folded(width: int, fold: bool) -> None:
    """Nor one that is not to be folded."""
    assert lines((LONG, "6 digits", "1000"), width=width, fold=fold)[1] == f"{LONG}  6 digits     1000"


def test_a_name_without_a_plus_is_whole() -> None:
    """Such a name is too long for the table, and stays readable."""
    assert lines(("x" * 60, "6 digits", "1"), width=40)[1] == f"{'x' * 60}  6 digits        1"
