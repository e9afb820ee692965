"""Values written as Python, and constructors whose arguments were seen."""

from __future__ import annotations

import enum
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, final

import pytest
import torch
from torch import nn
from typing_extensions import override

from unipar.observing.process.patches import Patches
from unipar.observing.process.python_text import MadeModules, python_of


class Size(enum.Enum):
    """A setting."""

    SMALL = 1


@dataclass
class Settings:
    """Settings of a model."""

    width: int = 8
    size: Size = Size.SMALL
    names: list[str] = field(default_factory=list[str])


class Net(nn.Module):
    """A model with settings."""

    def __init__(self, settings: Settings, *inner: nn.Module, depth: int = 2, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.settings, self.inner, self.depth, self.act = settings, nn.ModuleList(inner), depth, act()


class Widened(Net):
    """A model whose class calls another constructor."""

    def __init__(self, width: int) -> None:
        super().__init__(Settings(width))


class Plain(nn.Module):
    """A model without a constructor of its own."""


def _decorated(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def around(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)

    return around


class Wrapped(nn.Module):
    """A model whose constructor is decorated."""

    @_decorated
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


@final
class Opaque:
    """An object that nobody can make again from what it shows."""

    def __init__(self, secret: str) -> None:
        self.hidden = secret

    @override
    def __repr__(self) -> str:
        return "Opaque()"


class WithOpaque(nn.Module):
    """A model with such an object."""

    def __init__(self, thing: Opaque) -> None:
        super().__init__()
        self.thing = thing


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (3e-4, "0.0003"),
        (float("inf"), 'float("inf")'),
        ([1, (2,), {"a": True}], "[1, (2,), {'a': True}]"),
        (torch.bfloat16, "torch.bfloat16"),
        (Size.SMALL, "Size.SMALL"),
        (nn.GELU, "nn.GELU"),
        (Settings(16), "Settings(width=16)"),
        (Namespace(lr=0.1, n=2), "Namespace(lr=0.1, n=2)"),
    ],
    ids=str,
)
def test_value(value: Any, text: str) -> None:
    """A value that can be made again is written as Python that makes it."""
    assert python_of(value).text == text


@pytest.mark.parametrize(
    "value",
    [Opaque("x"), torch.zeros(2), lambda: 0, [Opaque("x")], list(range(1000))],
    ids=["object", "tensor", "lambda", "list", "long list"],
)
def test_value_that_is_not_known(value: Any) -> None:
    """What cannot be made again from what is seen has no text, but its class."""
    written = python_of(value)
    assert written.text == ""
    assert written.unknown


def test_names_have_modules() -> None:
    """Each name of the text has the module that it is imported from."""
    written = python_of([Settings(16), torch.float16, nn.Tanh])
    assert written.imports == {"Settings": __name__, "torch": "", "nn": "torch"}


def _made(make: Callable[[], nn.Module]) -> str:
    """Return the text of a model that is made while constructors are noted; its unknown arguments if it has none."""
    made, patches = MadeModules(), Patches()

    def note(module: nn.Module, *_: Any, **__: Any) -> None:
        made.note(module, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    patches.around(nn.Module, "__init__", before=note)
    try:
        model = make()
    finally:
        patches.undo()
    seen = made.describe(model)
    assert seen.made is not None
    assert (seen.name, seen.made.file) == (type(model).__qualname__, __file__)
    return seen.expression or f"unknown: {'; '.join(seen.unknown)}"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Net(Settings(4), depth=2, act=nn.GELU), "Net(settings=Settings(width=4), act=nn.GELU)"),
        (lambda: Widened(5), "Widened(width=5)"),
        (lambda: Wrapped(width=6), "Wrapped(width=6)"),
        (Plain, "Plain()"),
        (
            lambda: nn.Sequential(nn.Linear(8, 2, bias=False), nn.Sequential(nn.ReLU())),
            "nn.Sequential(nn.Linear(in_features=8, out_features=2, bias=False), nn.Sequential(nn.ReLU()))",
        ),
        (lambda: WithOpaque(Opaque("x")), "unknown: thing: Opaque"),
        (lambda: nn.Sequential(WithOpaque(Opaque("x"))), "unknown: an argument: thing: Opaque"),
    ],
    ids=["settings", "inherited", "decorated", "plain", "nested", "opaque", "opaque inside"],
)
def test_constructor(make: Callable[[], nn.Module], text: str) -> None:
    """Arguments are those of the model's own class, without those that have their default."""
    assert _made(make) == text


def test_class_in_a_function() -> None:
    """A class that no other file can import has no text."""

    class Inner(nn.Module):
        pass

    assert _made(Inner) == "unknown: " + Inner.__qualname__


def test_modules_are_not_kept() -> None:
    """What was noted keeps no module alive."""
    made, module = MadeModules(), nn.Linear(2, 2)
    made.note(module, None)
    assert made.describe(module).name == "Linear"
    del module
    assert made.python_of(nn.Linear(2, 2)).unknown == ("Linear",)
