"""The example's character GPT on a text that takes no time to read: each of 96 characters, eight times."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from examples.char_gpt import CharGPT


class ShortText(CharGPT):
    """Samples enough for microbatches of a plan."""

    @cached_property
    @override
    def text(self) -> str:
        return "".join(map(chr, range(96))) * 8


def short_text(layers: int = 2) -> dict[str, Any]:
    """Return the config's section `task` of a small model on that text."""
    return {"use": f"{Path(__file__)}:ShortText", "args": {"layers": layers, "width": 16, "heads": 2, "context": 8}}
