"""`ScriptSource`: lines of a script's text that a draft of a task takes over, with what they need."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from typing_extensions import override

from unipar.results.observed_recipe import CodePlace

_DEEPEST: Final = 8
_MOVES: Final = ("to", "cuda")
"""Methods that move a batch to the device, which unipar does itself."""

_OF_THE_COMMAND: Final = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "input")
"""Functions that read what a user types."""

_SIMPLE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


@dataclass
class TakenCode:
    """Lines of the script, and what must stand before them."""

    lines: list[str] = field(default_factory=list[str])
    """Statements for the body of a method, the last of which returns."""

    imports: dict[str, None] = field(default_factory=dict[str, None])
    copied: dict[str, str] = field(default_factory=dict[str, str])
    """Definitions of the script, by name, that stand in the draft as they are."""

    missing: list[str] = field(default_factory=list[str])
    """Names that could not be followed."""

    first: int = 0
    last: int = 0
    """Lines of the script that they come from."""


@final
class ScriptSource:
    """Text of a script, as a syntax tree."""

    def __init__(
        self,
        file: Path,
        text: str,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        callers: Sequence[CodePlace] = (),
    ) -> None:
        self.file, self._text = file, text
        self._tree = _Rename(arguments=arguments or {}).visit(ast.parse(text, str(file)))
        self._callers = [caller for caller in callers if caller.file == str(file)]
        self._top: dict[str, ast.stmt] = {}
        """Imports and definitions at the top level, by name."""

        for node in self._statements_of(ast.parse(text).body):
            for name in _bound_by(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
                self._top[name] = node
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._top[node.name] = node

    @classmethod
    def read(
        cls, file: str, arguments: Mapping[str, Mapping[str, Any]] | None = None, callers: Sequence[CodePlace] = ()
    ) -> ScriptSource | None:
        """Return the text of a file, or None if it is no Python.

        `arguments`: values that argparse gave, by variable; `callers`: lines that called the function with the loss.
        """
        try:
            return cls(Path(file), Path(file).read_text("utf-8"), arguments, callers)
        except (OSError, SyntaxError, ValueError):
            return None

    @property
    def can_be_imported(self) -> bool:
        """Whether an import runs definitions alone: what trains is behind `if __name__ == "__main__"`."""
        return all(
            isinstance(node, _SIMPLE)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
            for node in self._tree.body
        ) and not any(
            isinstance(node, ast.Assign | ast.AnnAssign) and any(isinstance(n, ast.Call) for n in ast.walk(node))
            for node in self._tree.body
        )

    # What is taken

    def definition(self, name: str) -> TakenCode:
        """Return what makes a name of the script known in the draft."""
        code = TakenCode()
        self._need(name, len(self._text.splitlines()), code, 0)
        return code

    def value_of(self, variable: str, line: int) -> TakenCode | None:
        """Return code that returns what a variable holds at a line, or None if it is assigned nowhere."""
        node = self._assignment(variable, line)
        return None if node is None or node.value is None else self._returning(node.value, node)

    def argument_of(self, function: str) -> TakenCode | None:
        """Return code that returns the first argument of the script's only call of a function, or None."""
        calls = [n for n in ast.walk(self._tree) if isinstance(n, ast.Call) and _name_of(n.func) == function and n.args]
        if len(calls) != 1:
            return None
        given = calls[0].args[0]
        if isinstance(given, ast.Name) and (found := self.value_of(given.id, given.lineno)) is not None:
            return found
        return self._returning(given, given)

    def _returning(self, value: ast.expr, place: ast.expr | ast.stmt) -> TakenCode:
        code = TakenCode(first=place.lineno, last=place.end_lineno or place.lineno)
        self._need_all(value, place.lineno, code, 0)
        code.lines.append(f"return {ast.unparse(value)}")
        return code

    def loss_at(
        self, line: int, models: Sequence[str], others: Sequence[str] = (), *, accumulates: bool
    ) -> TakenCode | None:
        """Return code that returns the loss whose backward is called at a line, or None if the line is not understood.

        `models`: variables that hold the model; `others`: those that hold another one.
        """
        path = list(self._path_to(line))
        call = next((c for node in ast.walk(self._tree) if _contains(node, line) for c in _backward_calls(node)), None)
        if call is None:
            return None
        loss = _loss_of(call)
        loops = [node for node in path if isinstance(node, ast.For | ast.While)]
        scope = loops[-1].body if loops else path[-2].body if len(path) > 1 and hasattr(path[-2], "body") else []  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
        before = [s for s in self._statements_of(scope) if (s.end_lineno or s.lineno) < call.lineno]  # pyright: ignore[reportUnknownArgumentType]
        if accumulates and isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
            loss = loss.left
        needed, chosen = _names_in(loss), list[ast.stmt]()
        for node in reversed(before):
            value = getattr(node, "value", None)
            bound = set(_bound_by(node))
            if value is None or not bound & needed or _only_moves(node):
                continue
            if accumulates and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and _is_same(node):
                continue
            chosen.insert(0, node)
            needed = (needed - bound if not isinstance(node, ast.AugAssign) else needed) | _names_in(value)
        rename = _Rename(dict.fromkeys(models, "model"))
        code = TakenCode(first=min([call.lineno, *(n.lineno for n in chosen)]), last=call.end_lineno or call.lineno)
        body = list[str]()
        target = _batch_target(loops[-1]) if loops else None
        bound = set[str]()
        if target is not None and (names := set(_stored_in(target))) & needed:
            if not (isinstance(target, ast.Name) and target.id == "batch"):
                body.append(f"{_without_brackets(target)} = batch")
            bound |= names
        for node in chosen:
            own: ast.stmt = node
            if isinstance(node, ast.Assign) and _is_next(node.value):
                own = ast.Assign(node.targets, ast.Name("batch"), lineno=node.lineno)
            body.append(ast.unparse(rename.visit(ast.parse(ast.unparse(own)))))
            bound |= set(_bound_by(node))
        if pair := self._drawn_batch(needed - bound - set(models)):
            body.insert(0, f"{', '.join(pair)} = batch")
            bound |= set(pair)
        code.missing += sorted(needed & set(others))
        models = (*models, *others)
        for name in sorted(needed - bound - set(models)):
            self._need(name, call.lineno, code, 0)
        for node in chosen:
            for name in sorted(_names_in(node) - bound - set(models) - {"batch"} - needed):
                self._need(name, call.lineno, code, 0)
        returned = ast.unparse(rename.visit(ast.parse(ast.unparse(loss), mode="eval")))
        if body and body[-1] == f"{returned} = {body[-1].partition(' = ')[2]}":
            returned = body.pop().partition(" = ")[2]
        code.lines += [*body, f"return {returned}"]
        return code

    # How it is found

    def _drawn_batch(self, names: set[str]) -> list[str]:
        """Return the variables that a function of the script sets together, such as `x, y = get_batch()`."""
        for node in ast.walk(self._tree):
            target = node.targets[0] if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
            pair = list(_stored_in(target)) if isinstance(target, ast.Tuple) else []
            if len(pair) > 1 and set(pair) <= names:
                return pair
        return []

    def _need_all(self, node: ast.AST, line: int, code: TakenCode, depth: int) -> None:
        for name in sorted(_names_in(node)):
            self._need(name, line, code, depth)

    def _need(self, name: str, line: int, code: TakenCode, depth: int) -> None:
        """Add what a name at a line stands for."""
        if hasattr(builtins, name) or name in code.copied or any(s.startswith(f"{name} = ") for s in code.lines):
            return
        if depth > _DEEPEST:
            code.missing.append(name)
            return
        node = self._assignment(name, line)
        passed = None if node is not None else self._passed(name, line)
        if passed is not None:
            value, at = passed
            if not _reads_the_command(value):
                if not (isinstance(value, ast.Name) and value.id == name):
                    self._need_all(value, at, code, depth + 1)
                    code.lines.append(f"{name} = {ast.unparse(value)}")
                else:
                    self._need(name, at, code, depth + 1)
        elif node is not None and node.value is not None and not _reads_the_command(node.value):
            self._need_all(node.value, node.lineno, code, depth + 1)
            code.lines.append(f"{name} = {ast.unparse(node.value)}")
        elif node is None and (definition := self._top.get(name)) is not None:
            self._need_definition(name, definition, code, depth)
        elif name not in code.missing:
            code.missing.append(name)

    def _need_definition(self, name: str, node: ast.stmt, code: TakenCode, depth: int) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if isinstance(node, ast.ImportFrom) and node.level:
                code.missing.append(name)
                return
            code.imports[_import_of(name, node)] = None
        elif self.can_be_imported:
            code.imports[f"from {self.file.stem} import {name}"] = None
        else:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            code.copied[name] = "\n".join(self._text.splitlines()[first - 1 : node.end_lineno])
            inner = TakenCode(imports=code.imports, copied=code.copied)
            for used in sorted(_names_in(node) - {name}):
                self._need(used, len(self._text), inner, depth + 1)
            own = code.copied.pop(name)
            code.copied.update({s.partition(" = ")[0]: s for s in inner.lines})
            code.copied[name] = own  # after what it needs
            code.missing += inner.missing

    def _assignment(self, name: str, line: int) -> ast.Assign | ast.AnnAssign | None:
        """Return the last assignment to a name before a line, in the functions around the line or at the top level."""
        scopes = [n for n in self._path_to(line) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        for scope in (*reversed(scopes), self._tree):
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and name in _arguments_of(scope):
                return None
            found = [
                node
                for node in self._statements_of(scope.body)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= line and _assigned(node) == name
            ]
            if found:
                return found[-1]
        return None

    def _passed(self, name: str, line: int) -> tuple[ast.expr, int] | None:
        """Return the argument that the function around a line was given under a name, and the line of that call."""
        scopes = [n for n in self._path_to(line) if isinstance(n, ast.FunctionDef)]
        if not scopes or name not in _arguments_of(scopes[-1]):
            return None
        function = scopes[-1]
        place = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        for caller in self._callers:
            for node in ast.walk(self._tree):
                if not (isinstance(node, ast.Call) and _contains(node, caller.line)):
                    continue
                if _name_of(node.func) != function.name:
                    continue
                given = dict(zip(place, node.args, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
                return (given[name], caller.line) if name in given else None
        return None

    def _path_to(self, line: int) -> Iterator[ast.AST]:
        """Yield the statements that contain a line, the outermost first."""
        inside: Iterable[ast.AST] = self._tree.body
        while True:
            node = next((n for n in inside if _contains(n, line)), None)
            if node is None:
                return
            yield node
            inside = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]

    def _statements_of(self, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements of a body, with those of blocks in it but not of functions and classes."""
        for node in body:
            yield node
            if isinstance(node, ast.With | ast.If | ast.Try | ast.For | ast.While):
                yield from self._statements_of(n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt))


class _Rename(ast.NodeTransformer):
    """Change of names, and of arguments of the command into their values."""

    def __init__(
        self, names: Mapping[str, str] | None = None, arguments: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._names, self._arguments = names or {}, arguments or {}

    @override
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        values = self._arguments.get(node.value.id, {}) if isinstance(node.value, ast.Name) else {}
        if node.attr in values and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.parse(repr(values[node.attr]), mode="eval").body, node)
        return self.generic_visit(node)

    @override
    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)


def _contains(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt | ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)


def _names_in(node: ast.AST) -> set[str]:
    """Return the names that code reads and does not bind itself."""
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local = stored if isinstance(node, ast.expr | ast.FunctionDef | ast.ClassDef) else set[str]()
    arguments = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return read - local - arguments


def _stored_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def _bound_by(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _stored_in(target)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield from _stored_in(node.target)


def _assigned(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    a = node.args
    return {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))}


def _import_of(name: str, node: ast.Import | ast.ImportFrom) -> str:
    """Return the import of one name."""
    alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
    text = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
    return f"import {text}" if isinstance(node, ast.Import) else f"from {node.module} import {text}"


def _reads_the_command(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and _name_of(n.func) in _OF_THE_COMMAND for n in ast.walk(node))


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else str(getattr(function, "id", ""))


def _backward_calls(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.Expr):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "backward":
                yield inner


def _loss_of(call: ast.Call) -> ast.expr:
    """Return the loss of `loss.backward()`, `scaler.scale(loss).backward()` or `library.backward(loss)`."""
    assert isinstance(call.func, ast.Attribute)
    if call.args:
        return call.args[0]
    loss = call.func.value
    scaled = isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale"
    return loss.args[0] if scaled and isinstance(loss, ast.Call) and loss.args else loss


def _batch_target(loop: ast.For | ast.While) -> ast.expr | None:
    """Return what a loop over batches binds to one, without the number that enumerate gives."""
    if not isinstance(loop, ast.For):
        return None
    target, over = loop.target, loop.iter
    counted = isinstance(over, ast.Call) and getattr(over.func, "id", "") == "enumerate"
    return target.elts[1] if counted and isinstance(target, ast.Tuple) and len(target.elts) == 2 else target


def _without_brackets(target: ast.expr) -> str:
    text = ast.unparse(target)
    return text[1:-1] if isinstance(target, ast.Tuple) and text.startswith("(") else text


def _is_next(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next"


def _is_same(node: ast.stmt) -> bool:
    """Return whether a statement assigns to a name that it reads: `loss = loss / n`."""
    return bool(set(_bound_by(node)) & _names_in(getattr(node, "value", node)))


def _only_moves(node: ast.stmt) -> bool:
    """Return whether a statement moves variables to a device: `x, y = x.to(device), y.to(device)`."""
    value = getattr(node, "value", None)
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return all(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in _MOVES
        and _names_in(part.func.value) <= set(_bound_by(node))
        for part in parts
    )
