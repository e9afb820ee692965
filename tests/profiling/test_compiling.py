"""Graph breaks and recompiles, each with its reason in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import Forks
from unipar.profiling.compiling import describe_break, describe_recompile

pytestmark = pytest.mark.forked

SCRIPT = """
import torch
from unipar.profiling.compiling import CompileCounts

def whole(x):
    return x + 1

def broken(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2

counts = CompileCounts()
for f in (whole, broken):
    compiled = torch.compile(f, backend="eager")
    compiled(torch.ones(2))
    compiled(torch.ones(3))
counts.pause()
torch.compile(lambda x: x - 1, backend="eager")(torch.ones(2))
counts.resume()
found = counts.read()
print(found.graphs, found.break_count, found.recompile_count, [*found.recompiles][0])
print([*found.breaks][0].splitlines()[0])
"""


def test_counts_of_the_compiler(forks: Forks, tmp_path: Path) -> None:
    """One break by hand, in a function compiled for two sizes; what is compiled in a pause does not count."""
    (tmp_path / "compiles.py").write_text(SCRIPT, encoding="utf-8")
    lines = forks.python(["compiles.py"], tmp_path).stdout.splitlines()
    graphs, breaks, recompiles, *why = lines[0].split()
    assert (graphs, breaks, recompiles) == ("6", "2", "3")
    assert " ".join(why).startswith("tensor 'x' size mismatch at index 0")
    assert lines[1].startswith("Call to `torch._dynamo.graph_break()`")


def test_reasons_are_one_line() -> None:
    """The first line, with what it was about; a recompile's without the number of the graph."""
    told = "Failed to trace builtin operator\n  Developer debug context: builtin print [] True\n\n more"
    assert describe_break(told) == "Failed to trace builtin operator (builtin print [] True)"
    assert describe_break("") == "no reason given"
    told = "0/1: tensor 'x' requires_grad mismatch. expected requires_grad=1"
    assert describe_recompile(told) == "tensor 'x' requires_grad mismatch. expected requires_grad=1"
