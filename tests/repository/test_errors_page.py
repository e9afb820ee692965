"""The page of errors: each of our classes is on it, and each text that it quotes stands in the source that it names."""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import unipar
from unipar import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text("utf-8")
OURS, _, THEIRS = PAGE.partition("\n## PyTorch\n")
LIBRARIES = sorted({(text, home) for text, home in re.findall(r"^\| `(.+?)` \| (\S+) \|", THEIRS, re.MULTILINE)})


def literals(file: Path) -> Iterator[str]:
    """Yield each text of a module, with `...` for what is filled in."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def folder_of(package: str) -> Path:
    """Return the folder of an installed package; the test is skipped where it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed here")
    return Path(spec.origin).parent


def test_every_class_has_its_heading() -> None:
    """Each error that is raised is found by the name of its class, and no heading names another."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)} & set(unipar.__all__)
    named = {word for line in re.findall(r"^### (.+)$", OURS, re.MULTILINE) for word in line.split(", ")}
    assert named == kinds - {"UniparError"}


def test_our_texts_stand_in_the_source() -> None:
    """A sentence that is reworded is reworded on the page."""
    quoted = re.findall(r"^\| `(.+?)` \|", OURS, re.MULTILINE)
    assert len(quoted) > 30
    files = [file for folder in ("unipar", "backends") for file in (ROOT / folder).rglob("*.py")]
    texts = [text for file in files for text in literals(file)]
    assert [sentence for sentence in quoted if not any(sentence in text for text in texts)] == []


def test_the_page_has_each_library() -> None:
    """Rows of all four, each with the file that its text is from."""
    assert {home.partition("/")[0] for _, home in LIBRARIES} == {
        "accelerate",
        "deepspeed",
        "horovod",
        "libtorch_cpu.so",
        "torch",
        "transformers",
    }
    assert len(LIBRARIES) == len(re.findall(r"^\| `", THEIRS, re.MULTILINE))


@pytest.mark.parametrize("home", sorted({home for _, home in LIBRARIES}))
def test_texts_of_libraries_stand_in_their_sources(home: str) -> None:
    """In the version that is installed."""
    quoted = [text for text, place in LIBRARIES if place == home]
    if home.endswith(".so"):
        with (folder_of("torch") / "lib" / home).open("rb") as file:
            library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            assert [text for text in quoted if library.find(text.encode()) < 0] == []
        return
    package, _, inside = home.partition("/")
    texts = list(literals(folder_of(package) / inside))
    assert [text for text in quoted if not any(text in whole for whole in texts)] == []
