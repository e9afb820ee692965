"""The API's docs: each public name has an example that runs, and each function its parameters, result and errors."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from textwrap import dedent

import pytest

import unipar
from tests.support.forks import Forks

PAGE = (Path(__file__).parents[2] / "docs/api/functions.md").read_text("utf-8")
FILES = dict(re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
"""Files that the examples use, by name."""

NAMES = sorted(set(unipar.__all__) - {"__version__"})
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(unipar, name))]
ERRORS = {
    name for name in NAMES if isinstance(kind := getattr(unipar, name), type) and issubclass(kind, unipar.UniparError)
}
SCRIPT = """
import doctest, pathlib, torch, unipar
test = doctest.DocTestParser().get_doctest(unipar.{name}.__doc__, dict(globals()), "{name}", None, 0)
runner = doctest.DocTestRunner(verbose=False)
runner.run(test)
raise SystemExit(runner.failures)
"""

pytestmark = pytest.mark.forked


def doc_of(name: str) -> str:
    return inspect.getdoc(getattr(unipar, name)) or ""


def examples_of(name: str) -> str:
    """Return the section with the example, or "" if there is none."""
    return doc_of(name).partition("\nExamples:\n")[2]


def test_every_public_name_has_an_example() -> None:
    """Errors that have no fields of their own need none beside that of their base class."""
    assert [name for name in NAMES if not examples_of(name)] == sorted(
        ERRORS - {"UniparError", "Unsupported", "WorkerFailed"}
    )


def test_each_function_names_its_parameters_result_and_errors() -> None:
    """As sections of its docstring, with every parameter in the order of the signature."""
    assert FUNCTIONS == ["compare", "gathered", "join", "launch", "plan", "scale", "verify"]
    for name in FUNCTIONS:
        doc = doc_of(name)
        named = re.findall(r"^    (\w+): ", doc.partition("\nArgs:\n")[2].partition("\n\n")[0], re.MULTILINE)
        assert named == list(inspect.signature(getattr(unipar, name)).parameters), name
        assert re.search(r"^(?:Returns|Yields):\n    \w", doc, re.MULTILINE), name
        raised = re.findall(r"^    (\w+): ", doc.partition("\nRaises:\n")[2].partition("\n\n")[0], re.MULTILINE)
        assert raised, name
        assert set(raised) <= {*ERRORS, "TypeError"}, name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.sweep if name in ("compare", "scale") else ())  # half a minute each
        for name in NAMES
        if examples_of(name)
    ],
)
def test_the_example_runs(name: str, tmp_path: Path, forks: Forks) -> None:
    """In a folder with the files that the page on functions shows, and prints what it says."""
    for file, text in FILES.items():
        (tmp_path / file).write_text(text, "utf-8")
    script = re.search(r"```python\n(.*?)```", dedent(examples_of(name)), re.DOTALL)
    (tmp_path / "example.py").write_text(script[1] if script else SCRIPT.format(name=name), "utf-8")
    done = forks.python(["example.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
