"""Recorder of the device lines that a process executes: modules are compiled with a call before each such line.

It sees what coverage.py cannot: threads that torch's autograd starts for a device (before Python 3.12), processes that
are killed, and which arm of a conditional expression was taken. A process writes a line when it is first executed.
"""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from tests.support.softcuda.coverage.device_lines import ROOT, Position, find_device_lines, is_searched, position_of

RECORDS = "DEVICE_LINES"
"""Environment variable with the file of executed lines; without it nothing is recorded."""

NAME = "_device_line"
"""Function of this module, as recorded modules call it."""

_executed: set[tuple[str, str, Position]] = set()


def install() -> None:
    """Record the modules of unipar that this process imports from now on."""
    get_code: Callable[[SourceFileLoader, str], Any] = SourceFileLoader.get_code

    def get_recorded_code(self: SourceFileLoader, fullname: str) -> Any:
        path = Path(self.path)
        file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if not is_searched(file):
            return get_code(self, fullname)
        tree = ast.parse(self.get_data(self.path), self.path)
        return compile(_Recorded(file, tree).tree, self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_recorded_code


def record(file: str, line: int, column: int) -> None:
    """Note that a device line is executed, and on which emulated machine, if on any."""
    key = (os.environ.get("SOFTCUDA", ""), file, (line, column))
    if key in _executed:
        return
    _executed.add(key)
    if records := os.environ.get(RECORDS):
        try:
            with open(records, "a", encoding="utf-8") as out:
                out.write(f"{key[0]}\t{file}\t{line}\t{column}\n")
        except OSError as e:
            if e.errno != errno.EROFS:  # a machine in a namespace has no writable file system but its own
                raise


def read_records(records: Path) -> set[tuple[str, str, Position]]:
    """Return the executed lines of all processes: machine, file and position."""
    rows = (line.split("\t") for line in records.read_text("utf-8").splitlines())
    return {(machine, file, (int(line), int(column))) for machine, file, line, column in rows}


@final
class _Recorded(ast.NodeTransformer):
    """A module with a call before each device line."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self._file = file
        self._found = found = find_device_lines(tree, file)
        self._statements, self._arms = {*map(id, found.statements)}, {*map(id, found.arms)}
        self.tree: ast.Module = self.visit(tree)
        if self._statements or self._arms:
            self.tree.body[_after_docstring(tree) : 0] = ast.parse(f"from {__name__} import record as {NAME}").body
        ast.fix_missing_locations(self.tree)

    @override
    def generic_visit(self, node: ast.AST) -> Any:
        marked, at = id(node), node
        node = super().generic_visit(node)
        if marked in self._arms:
            assert isinstance(at, ast.expr)
            pair = ast.Tuple([self._call(at), at], ast.Load())
            return ast.copy_location(ast.Subscript(pair, ast.Constant(1), ast.Load()), at)
        if marked in self._statements:
            assert isinstance(at, ast.stmt)
            return [ast.copy_location(ast.Expr(self._call(at)), at), node]
        return node

    def _call(self, node: ast.stmt | ast.expr) -> ast.Call:
        line, column = position_of(node)
        words: list[ast.expr] = [ast.Constant(word) for word in (self._file, line, column)]
        call = ast.Call(ast.Name(NAME, ast.Load()), words, [])
        for part in ast.walk(call):
            ast.copy_location(part, node)
        return call


def _after_docstring(tree: ast.Module) -> int:
    """Return the number of statements that must come first: the docstring, and imports from __future__."""
    first = [i for i, s in enumerate(tree.body) if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    return first[-1] + 1 if first else int(ast.get_docstring(tree) is not None)
