"""How near two series of losses are, and how a step time is shown."""

from __future__ import annotations

import pytest

from tests.support.compared_rows import ONE, compared
from unipar.results.loss_agreement import measure_agreement
from unipar.results.row import (
    format_spread,
)


@pytest.mark.parametrize(
    ("losses", "text", "within"),
    [
        ([4.0, 3.0], "same bits", True),
        ([4.0, 3.0000006], "6 digits", True),
        ([4.0, 3.00002], "5 digits", False),
        ([4.0, 3.2], "1 digit", False),
        ([4.0, 9.0], "0 digits", False),
        ([4.0, 6.0], "0 digits", False),
    ],
)
def test_digits_come_from_the_largest_relative_difference(losses: list[float], text: str, within: bool) -> None:
    """Relative 2e-7 is six digits, 1e-5 is five."""
    found = measure_agreement(losses, [4.0, 3.0], 2e-6)
    assert (str(found), found.within) == (text, within)


def test_the_tolerance_is_held_over_the_first_twenty_steps() -> None:
    """Later on training itself makes small differences large; the digits still tell."""
    reference = [1.0] * 40
    found = measure_agreement([1.0] * 20 + [1.1] * 20, reference, 2e-6)
    assert (found.digits, found.within, found.step) == (0, True, 1)
    assert measure_agreement([1.0] * 19 + [1.1] * 21, reference, 2e-6).within is False


def test_a_loss_beside_one_of_zero_has_no_digits() -> None:
    """The tolerance decides: rounding is no disagreement."""
    found = [measure_agreement([1.0, off], [1.0, 0.0], 2e-6) for off in (1e-17, 1e-3)]
    assert [(str(one), one.within, one.step) for one in found] == [("0 digits", True, 2), ("0 digits", False, 2)]


@pytest.mark.parametrize(
    ("precision", "off", "within"),
    [
        ("bf16-mixed", 0.004, True),
        ("bf16-mixed", 0.006, False),
        ("bf16-master", 0.019, True),
        ("bf16-master", 0.021, False),
    ],
)
def test_a_loss_in_bf16_has_the_room_of_its_last_digits(precision: str, off: float, within: bool) -> None:
    """With bf16 parameters the loss is bf16 too, and one process in fp32 does not round it."""
    other = ONE.changed(strategy="native/parameters", losses=[x * (1 + off) for x in ONE.losses])
    assert (compared(ONE, other, precision=precision).disagreeing_rows == []) is within


def test_a_small_loss_is_held_to_the_tolerance_itself() -> None:
    """Below 1 the tolerance is absolute: the last digits of a loss near zero mean nothing."""
    assert measure_agreement([1.5e-6], [1e-6], 2e-6).within


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([0.2, 0.21, 0.22], "210 [205..215]"),
        ([0.0112, 0.0114], "11 [11..11]"),
        ([0.0042, 0.0052], "4.7 [4.5..4.9]"),
        ([0.0004], "0.40 [0.40..0.40]"),
    ],
)
def test_a_step_time_is_shown_with_its_middle_half(seconds: list[float], text: str) -> None:
    """In milliseconds, with two figures or more."""
    assert format_spread(seconds) == text
