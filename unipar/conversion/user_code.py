"""The user's own code for a script without unipar: the same text, less what is unipar's."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unipar.errors import TaskError

RESERVED_MODULES = ("train", "task", "samples")
"""Modules of the script itself."""

_LAUNCH_FUNCTIONS = ("launch", "join")


@dataclass(frozen=True)
class TextReplacement:
    """A piece of the text, from byte to byte, that gives way to another."""

    start: int
    end: int
    text: str = ""


def extract_user_code(file: Path, name: str) -> dict[str, str]:
    """task.py, which holds class `name`, and the modules that stand beside the user's file and are imported by it."""
    made: dict[str, str] = {}
    waiting = [(file, "task.py")]
    while waiting:
        now, called = waiting.pop()
        text, tree = _SourceFile.read(now).without_unipar(top=now == file)
        made[called] = text
        for module, line in _imported_modules(tree, now):
            beside = now.parent / f"{module}.py"
            if (now.parent / module / "__init__.py").is_file():
                raise TaskError(
                    f"{now}, line {line}: the package {module} stands beside it, and a script takes along single files "
                    "only: install the package, or import what is needed from one file"
                )
            if beside.is_file() and beside != now and beside.name not in made:
                if module in RESERVED_MODULES:
                    raise TaskError(
                        f"{now}, line {line}: it imports {beside.name}, and a script has a file of that name itself: "
                        "rename yours"
                    )
                waiting.append((beside, beside.name))
    return made


def _imported_modules(tree: ast.Module, file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise TaskError(f"{file}, line {node.lineno}: a relative import; a script takes single files along")
            yield str(node.module).partition(".")[0], node.lineno


class _SourceFile:
    """One file on its way."""

    def __init__(self, file: Path, source: bytes, tree: ast.Module) -> None:
        self.file, self.source, self.tree = file, source, tree
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.names: dict[str, str] = {}
        """What unipar's names are called here: {"unipar": "", "Task": "Task"}."""

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
        """Without unipar, and what that text parses to."""
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
        """With one of the empty lines around it, where it stood between two."""
        span = self._whole_lines(node)
        between = self.source[: span.start].endswith(b"\n\n") and self.source[span.end :].startswith(b"\n")
        return TextReplacement(span.start, span.end + between)

    def _unneeded(self, *, top: bool) -> Iterator[TextReplacement]:
        """Imports of unipar, what runs as a program only, and what comes after a launch."""
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
        """Which of unipar's names this is: `unipar.Task` and `Task` are both Task."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and self.names.get(node.value.id) == "":
            return node.attr
        return None

    def _task_base_spans(self, node: ast.ClassDef) -> Iterator[TextReplacement]:
        """A class without its base Task."""
        mine = [base for base in node.bases if self._means(base) == "Task"]
        if not mine:
            return
        if len(node.bases) == 1:
            for call in ast.walk(node):
                if self._is_super_call(call):
                    raise self._error_at(
                        call, "super() reaches unipar.Task, which is not there: write out what it would do"
                    )
        others: list[ast.expr | ast.keyword] = [b for b in node.bases if b not in mine]
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
        """Whatever else of unipar the code uses, and where it stands itself: it will stand elsewhere."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                if any(m.partition(".")[0] == "unipar" for m in modules) and not self._inside(node, spans):
                    raise self._error_at(node, "it imports unipar inside; a script has no unipar")
            if not isinstance(node, ast.Name) or self._inside(node, spans):
                continue
            if node.id in self.names:
                raise self._error_at(
                    node, f"it uses {self._shown(node)}, and a script has no unipar: write out what it does"
                )
            if node.id == "__file__":
                raise self._error_at(
                    node, "it reads __file__, which is elsewhere in a script: give the path by task.args"
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
        """Imports that only the part which is gone had use for."""
        now = ast.parse(text)
        before, after = _names_used(self.tree), _names_used(now)
        lines = text.splitlines(keepends=True)
        for node in reversed(now.body):
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
    """Two empty lines at most, one newline at the end."""
    while "\n\n\n\n" in text:
        text = text.replace("\n\n\n\n", "\n\n\n")
    return text.strip("\n") + "\n"
