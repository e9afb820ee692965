"""Extraction of the user's code for a script without unipar: the same text, with unipar's parts removed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unipar.errors import TaskError

RESERVED_MODULES = ("train", "task", "samples", "token_split")
"""Names of the modules that the script itself consists of."""

_LAUNCH_FUNCTIONS = ("launch", "join")


@dataclass(frozen=True)
class TextReplacement:
    """Range of bytes that is replaced by another text."""

    start: int
    end: int
    text: str = ""


def extract_user_code(file: Path, name: str) -> dict[str, str]:
    """Return the text of task.py, which holds class `name`, and of the modules in its folder that it imports."""
    texts: dict[str, str] = {}
    waiting = [(file, "task.py")]
    while waiting:
        current, new_name = waiting.pop()
        text, tree = _SourceFile.read(current).without_unipar(top=current == file)
        texts[new_name] = text
        for module, line in _imported_modules(tree, current):
            neighbour = current.parent / f"{module}.py"
            if (current.parent / module / "__init__.py").is_file():
                raise TaskError(
                    f"{current}, line {line}: the package {module} is in the same folder, and a script can include "
                    "single files only: install the package, or import what is needed from one file"
                )
            if neighbour.is_file() and neighbour != current and neighbour.name not in texts:
                if module in RESERVED_MODULES:
                    raise TaskError(
                        f"{current}, line {line}: it imports {neighbour.name}, and a script has a file of that name "
                        "itself: rename yours"
                    )
                waiting.append((neighbour, neighbour.name))
    return texts


def _imported_modules(tree: ast.Module, file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise TaskError(
                    f"{file}, line {node.lineno}: a relative import; a script can include single files only: "
                    "import the module by its name"
                )
            yield str(node.module).partition(".")[0], node.lineno


class _SourceFile:
    """One file of the user, as bytes and as a syntax tree."""

    def __init__(self, file: Path, source: bytes, tree: ast.Module) -> None:
        self.file, self.source, self.tree = file, source, tree
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.names: dict[str, str] = {}
        """Names that the file's imports bind to parts of unipar: {"unipar": "", "Task": "Task"}."""

    @classmethod
    def read(cls, file: Path) -> _SourceFile:
        source = file.read_bytes()
        try:
            source = source.decode("utf-8").replace("\r\n", "\n").encode()
            return cls(file, source, ast.parse(source, str(file)))
        except (SyntaxError, ValueError) as e:
            line = getattr(e, "lineno", None)
            raise TaskError(f"{file}{f', line {line}' if line else ''}: {getattr(e, 'msg', e)}") from None

    def without_unipar(self, *, top: bool) -> tuple[str, ast.Module]:
        """Return the text without unipar's parts, and its syntax tree."""
        spans = list(self._unneeded(top=top))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                spans += self._task_base_spans(node)
        self._refuse_the_rest(spans)
        text = self._replace_spans(spans)
        text = self._without_idle_imports(text)
        return text, ast.parse(text)

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _whole_lines(self, node: ast.stmt) -> TextReplacement:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        assert node.end_lineno is not None
        return TextReplacement(self._starts[first - 1], self._starts[node.end_lineno])

    def _statement_with_blank_line(self, node: ast.stmt) -> TextReplacement:
        """Return the range of the statement and, where it stands between two empty lines, of one of them."""
        span = self._whole_lines(node)
        between = self.source[: span.start].endswith(b"\n\n") and self.source[span.end :].startswith(b"\n")
        return TextReplacement(span.start, span.end + between)

    def _unneeded(self, *, top: bool) -> Iterator[TextReplacement]:
        """Yield the imports of unipar, the `if __name__` blocks, and everything from a call of launch() on."""
        for node in self.tree.body:
            if isinstance(node, ast.Import) and any(a.name.partition(".")[0] == "unipar" for a in node.names):
                if len(node.names) > 1:
                    raise self._error_at(
                        node, "it imports unipar and others in one statement: give each a line of its own"
                    )
                self.names[node.names[0].asname or "unipar"] = ""
                yield self._statement_with_blank_line(node)
            elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "unipar":
                self.names |= {a.asname or a.name: a.name for a in node.names}
                yield self._statement_with_blank_line(node)
            elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and not node.orelse:
                yield self._whole_lines(node)
            elif top and not isinstance(node, ast.ClassDef | ast.FunctionDef) and self._calls_launch(node):
                yield TextReplacement(self._whole_lines(node).start, len(self.source))
                return

    def _calls_launch(self, node: ast.stmt) -> bool:
        return any(isinstance(inner, ast.expr) and self._means(inner) in _LAUNCH_FUNCTIONS for inner in ast.walk(node))

    def _means(self, node: ast.expr) -> str | None:
        """Return the name in unipar that an expression refers to: "Task" for both `unipar.Task` and `Task`."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and self.names.get(node.value.id) == "":
            return node.attr
        return None

    def _task_base_spans(self, node: ast.ClassDef) -> Iterator[TextReplacement]:
        """Yield the replacement that removes the base class Task; refuse calls of its methods by super()."""
        task_bases = [base for base in node.bases if self._means(base) == "Task"]
        if not task_bases:
            return
        if len(node.bases) == 1:
            for call in ast.walk(node):
                if self._is_super_call(call):
                    raise self._error_at(
                        call, "super() calls unipar.Task, which a script does not have: write out what it does"
                    )
        others: list[ast.expr | ast.keyword] = [b for b in node.bases if b not in task_bases]
        others += node.keywords
        last = max([*node.bases, *node.keywords], key=lambda b: (b.end_lineno or 0, b.end_col_offset or 0))
        start = self.source.index(b"(", self._at(node.lineno, node.col_offset))
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        end = self.source.index(b")", self._at(last.end_lineno, last.end_col_offset)) + 1
        kept = ", ".join(ast.unparse(other) for other in others)
        yield TextReplacement(start, end, f"({kept})" if kept else "")

    def _is_super_call(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "super"
            and node.attr != "__init__"
        )

    def _refuse_the_rest(self, spans: Sequence[TextReplacement]) -> None:
        """Raise TaskError where the remaining code uses unipar, or `__file__`, which differs in a script."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                if any(m.partition(".")[0] == "unipar" for m in modules) and not self._inside(node, spans):
                    raise self._error_at(node, "it imports unipar inside a function; a script has no unipar")
            if not isinstance(node, ast.Name) or self._inside(node, spans):
                continue
            if node.id in self.names:
                raise self._error_at(
                    node, f"it uses {self._shown(node)}, and a script has no unipar: write out what it does"
                )
            if node.id == "__file__":
                raise self._error_at(
                    node, "it reads __file__, which is another path in a script: give the path by task.args"
                )

    def _shown(self, node: ast.Name) -> str:
        line = self.source.splitlines()[node.lineno - 1][node.col_offset :].decode()
        end = next((i for i, c in enumerate(line) if not (c.isidentifier() or c == "." or c.isdigit())), len(line))
        return line[:end]

    def _inside(self, node: ast.expr | ast.stmt, spans: Sequence[TextReplacement]) -> bool:
        at = self._at(node.lineno, node.col_offset)
        return any(span.start <= at < span.end for span in spans)

    def _error_at(self, node: ast.AST, why: str) -> TaskError:
        return TaskError(f"{self.file}, line {getattr(node, 'lineno', '?')}: {why}")

    def _replace_spans(self, spans: Sequence[TextReplacement]) -> str:
        text = self.source
        for span in sorted(spans, key=lambda s: s.start, reverse=True):
            text = text[: span.start] + span.text.encode() + text[span.end :]
        return _tidy_blank_lines(text.decode())

    def _without_idle_imports(self, text: str) -> str:
        """Return the text without the imports that only the removed parts used."""
        tree = ast.parse(text)
        before, after = _names_used(self.tree), _names_used(tree)
        lines = text.splitlines(keepends=True)
        for node in reversed(tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno == node.end_lineno:
                bound = {(a.asname or a.name).partition(".")[0] for a in node.names}
                if bound & before and not bound & after:
                    at = node.lineno - 1
                    between = lines[at - 1 : at] == ["\n"] == lines[at + 1 : at + 2]
                    del lines[at : at + 1 + between]
        return _tidy_blank_lines("".join(lines))


def _names_used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _tidy_blank_lines(text: str) -> str:
    """Return the text with at most two empty lines in a row, and one newline at its end."""
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text.strip("\n") + "\n"
