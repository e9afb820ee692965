"""Functions with something before and after them, and their return."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unipar.observing.process.patches import Patches


class Loop:
    """A class with a method, as a library has it."""

    def step(self, number: int, *, more: int = 0) -> int:
        """Return the sum."""
        return number + more


class Longer(Loop):
    """A class that inherits it."""


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def test_something_before_and_after(patches: Patches) -> None:
    """Before gets the arguments, after the result and the arguments; the result is the function's own."""
    seen: list[Any] = []

    def before(_: Loop, *args: int, **kwargs: int) -> None:
        seen.append((args, kwargs))

    def after(result: int, _: Loop, *args: int, **kwargs: int) -> None:
        seen.append((result, args, kwargs))

    patches.around(Loop, "step", before=before, after=after)
    assert Loop().step(2, more=3) == 5
    assert seen == [((2,), {"more": 3}), (5, (2,), {"more": 3})]
    assert Loop.step.__doc__ == "Return the sum."


def test_an_error_of_the_function_is_its_own(patches: Patches) -> None:
    """What the function raises goes through, and nothing is called after it."""
    seen: list[str] = []
    patches.around(Loop, "step", before=lambda *_: seen.append("before"), after=lambda *_: seen.append("after"))
    with pytest.raises(TypeError, match="unsupported operand"):
        Loop().step(None)  # pyright: ignore[reportArgumentType]
    assert seen == ["before"]


def test_everything_is_put_back() -> None:
    """After undo a class has the same function as before, one that inherited it inherits it, and hooks are removed."""
    patches, real, removed = Patches(), Loop.step, list[str]()
    patches.around(Loop, "step", before=lambda *_: None)
    patches.around(Longer, "step", before=lambda *_: None)
    patches.keep(SimpleNamespace(remove=lambda: removed.append("hook")))
    assert "step" in vars(Longer)
    patches.undo()
    assert (Loop.step, "step" in vars(Longer), removed) == (real, False, ["hook"])
    patches.undo()  # nothing is left to put back
    assert removed == ["hook"]


def test_one_function_twice(patches: Patches) -> None:
    """Two patches of one function both act, and one undo puts both back."""
    real, seen = Loop.step, list[str]()
    patches.around(Loop, "step", before=lambda *_: seen.append("first"))
    patches.around(Loop, "step", before=lambda *_: seen.append("second"))
    assert Loop().step(1) == 1
    assert seen == ["second", "first"]
    patches.undo()
    assert Loop.step is real


def test_what_is_not_there_is_left_alone(patches: Patches) -> None:
    """A library without the function gets none."""
    patches.around(Loop, "leap", before=lambda *_: None)
    assert not hasattr(Loop, "leap")
