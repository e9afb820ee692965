"""Checks of a task's code without importing it: read with `ast`, so that `check` needs no torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.errors import TaskError
from unipar.task.task import LOSS_ACROSS, describe_misspelt_method
from unipar.utils.text import closest

if TYPE_CHECKING:
    from unipar.task.location import CodeLocation

_NEEDED_METHODS = ("model", "data", "loss")


def check_task_code(where: CodeLocation, args: Mapping[str, Any], path: Sequence[str]) -> None:
    """Raise TaskError unless the file exists, parses, and has the class with the methods that a task needs."""
    file = Path(where.file) if where.file else find_module_file(str(where.module), path)
    if file is None:
        raise TaskError(
            f"task.use: there is no module {where.module!r} on the path; install it, or write file.py:Class"
        )
    if not file.is_file():
        raise TaskError(f"task.use: the file {file} does not exist; the path is relative to the config")
    try:
        tree = ast.parse(file.read_bytes(), str(file))  # bytes: the file may name an encoding of its own
    except SyntaxError as e:
        at = f", line {e.lineno}" if e.lineno else ""
        raise TaskError(f"{file}{at}: {e.msg}") from None
    except ValueError as e:  # null bytes, where Python does not call that a syntax error
        raise TaskError(f"{file}: {e}") from None
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if where.name not in classes:
        _check_class_name(where.name, file, tree, list(classes))
        return
    _check_methods(classes[where.name], classes, file)
    _check_spelling(classes[where.name], tree, file)
    _check_arguments(classes[where.name], args)


def find_module_file(module: str, path: Sequence[str]) -> Path | None:
    """Return the file of a module on the path, or None."""
    tail = module.replace(".", "/")
    for folder in path:
        for file in (Path(folder) / f"{tail}.py", Path(folder) / tail / "__init__.py"):
            if file.is_file():
                return file
    return None


def _check_class_name(name: str, file: Path, tree: ast.Module, classes: list[str]) -> None:
    bound = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    if name in bound | _assigned_names(tree) or any(
        isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(tree)
    ):
        return  # imported or assigned there: only the worker, which imports the file, can check it
    near = closest(name, classes)
    hint = f"; did you mean {near}?" if near else f"; its classes: {', '.join(classes) or 'none'}"
    raise TaskError(f"task.use: {file} has no class {name}{hint}")


def _assigned_names(node: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names assigned by `=` directly in the body, not in nested blocks."""
    targets = [t for n in node.body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in node.body if isinstance(n, ast.AnnAssign) and n.value is not None]
    return {inner.id for t in targets for inner in ast.walk(t) if isinstance(inner, ast.Name)}


def _check_methods(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], file: Path) -> None:
    """Raise if needed methods are missing in the class and its bases; a base from another file may have them."""
    have: set[str] = set()
    todo = [node]
    while todo:
        now = todo.pop()
        have |= {n.name for n in now.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)} | _assigned_names(
            now
        )
        for base in now.bases:
            name = ast.unparse(base).rpartition(".")[2]
            known = classes.get(name)
            if known is not None and known.lineno < now.lineno:  # a class defined further down cannot be the base
                todo.append(known)
            elif name not in ("Task", "ABC", "object"):
                return
    needed = _NEEDED_METHODS if "loss" in have or not have & {*LOSS_ACROSS} else ("model", "data", *LOSS_ACROSS)
    lacking = [f"{m}()" for m in needed if m not in have]
    if lacking:
        raise TaskError(f"task.use: {node.name} in {file} does not have {', '.join(lacking)}")


def _check_spelling(node: ast.ClassDef, tree: ast.Module, file: Path) -> None:
    """Raise if a method's name is nearly that of one of Task's, and nothing in the file uses it."""
    used = {inner.attr for inner in ast.walk(tree) if isinstance(inner, ast.Attribute)}
    names = [n.name for n in node.body if isinstance(n, ast.FunctionDef)] + sorted(_assigned_names(node))
    if (sentence := describe_misspelt_method([n for n in names if n not in used], names)) is not None:
        raise TaskError(f"task.use: {node.name} in {file}: {sentence}")


def _check_arguments(node: ast.ClassDef, args: Mapping[str, Any]) -> None:
    """Raise if task.args do not fit the parameters of the class's `__init__`, if it defines one."""
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None or init.args.kwarg is not None:
        return
    named = [a.arg for a in (*init.args.posonlyargs, *init.args.args)][1:]
    every = named + [a.arg for a in init.args.kwonlyargs]
    needed = named[: len(named) - len(init.args.defaults)] + [
        a.arg for a, d in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if d is None
    ]
    for name in args:
        if name not in every:
            near = closest(name, every)
            hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(every) or 'none'}"
            raise TaskError(f"task.args.{name}: {node.name} has no such argument; {hint}")
    absent = [name for name in needed if name not in args]
    if absent:
        raise TaskError(f"task.args: {node.name} needs {', '.join(absent)}")
