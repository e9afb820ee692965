"""`unipar init`: a first config beside a script, from what its text says."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path

from unipar.config.yaml_edit import yaml_value
from unipar.conversion.config_schema import SCHEMA_FILE
from unipar.conversion.import_config import write_config
from unipar.errors import ConfigError, TaskError
from unipar.utils.text import count_of

_PARTS = ("model", "data", "loss")


@dataclass(frozen=True)
class ScriptTask:
    """Class of a script that can be a task."""

    name: str
    needed: tuple[str, ...]
    """Arguments of its `__init__` that have no default."""


def write_first_config(script: Path, out: Path | None = None, *, overwrite: bool = False) -> Path:
    """Write a config for the task in `script`, which may be the one such script of a folder; return its path."""
    script = _find_script(script)
    tasks = find_tasks(script)
    out = out or script.with_suffix(".yaml")
    write_config(first_config_text(script, tasks, out), out, overwrite=overwrite)
    return out


def find_tasks(script: Path) -> list[ScriptTask]:
    """Return the classes with model, data and loss; raise TaskError, which says what was found, if there is none."""
    tree = _parse(script)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    tasks = [_describe(node) for node in classes if _is_task(node)]
    if tasks:
        return tasks
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    has = [f"the function {name}()" for name in functions if name in _PARTS]
    has += [f"the class {node.name}" for node in classes]
    contents = f"it has {', '.join(has)}" if has else "it has no class"
    parser = "; what argparse reads becomes arguments of that class" if "argparse" in _imports(tree) else ""
    raise TaskError(
        f"{script}: no class in it has model(), data() and loss(): {contents}; write one that has them "
        f"(`python -m pydoc unipar.Task`){parser}, then `unipar init {script}` again"
    )


def first_config_text(script: Path, tasks: list[ScriptTask], out: Path) -> str:
    """Return a config for the first of the classes, with a comment on each choice."""
    task = tasks[0]
    where = Path(os.path.relpath(script.resolve(), out.resolve().parent)).as_posix()
    others = ", ".join(other.name for other in tasks[1:])
    args = [
        f"  # args: {{{', '.join(f'{name}: ...' for name in task.needed)}}}    # {task.name} needs "
        f"{'this' if len(task.needed) == 1 else 'these'}: give values, and take the first # away"
    ]
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# First config for {script.name}, made by `unipar init`; `unipar explain {out.name}` shows every key.",
        "",
        "task:",
        f"  use: {yaml_value(f'{where}:{task.name}')}",
        *([f"  # Others in this file: {others}."] if others else []),
        *(args if task.needed else []),
        "",
        "# The library that trains: `unipar backends` lists all; --backend STRATEGY takes another one for one call.",
        "backend: native",
        "parallel:",
        "  data: auto        # ranks on different data: one per GPU, or those that a launcher started",
        "  shard: nothing    # what they split: nothing, optimizer, gradients, parameters",
        "",
        "# Samples in one optimizer step, over all ranks. Too much for memory? Add micro: auto, or micro: 4.",
        "batch:",
        "  total: 32",
        "",
        "train:",
        "  steps: 100        # or epochs: 3",
        "  optimizer: {name: adamw, lr: 3.0e-4}",
        "  schedule: {name: cosine, warmup: 10}",
        "  clip: 1.0         # largest norm of the gradient",
        "  precision: fp32   # on GPUs: bf16-mixed",
        "  seed: 0",
        "",
        "log:",
        "  every: 10",
        "",
    ]
    return "\n".join(lines)


def _find_script(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; name the script with your task: unipar init train.py")
        return path
    scripts = sorted(path.glob("*.py"))
    having = [script for script in scripts if _has_task(script)]
    if len(having) == 1:
        return having[0]
    names = ", ".join(script.name for script in having)
    why = (
        f"{count_of(len(having), 'script')} with a task ({names})"
        if having
        else (f"no script with a task among {count_of(len(scripts), 'Python file')}")
    )
    raise ConfigError(f"{path}: a folder with {why}; name one script, such as {having[0] if having else 'train.py'}")


def _has_task(script: Path) -> bool:
    try:
        return any(isinstance(node, ast.ClassDef) and _is_task(node) for node in _parse(script).body)
    except TaskError:
        return False


def _parse(script: Path) -> ast.Module:
    try:
        return ast.parse(script.read_bytes(), str(script))
    except SyntaxError as e:
        at = f", line {e.lineno}" if e.lineno else ""
        raise TaskError(f"{script}{at}: {e.msg}") from None
    except ValueError as e:  # null bytes
        raise TaskError(f"{script}: {e}") from None


def _is_task(node: ast.ClassDef) -> bool:
    methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    return methods.issuperset(_PARTS)


def _describe(node: ast.ClassDef) -> ScriptTask:
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None:
        return ScriptTask(node.name, ())
    named = [a.arg for a in (*init.args.posonlyargs, *init.args.args)]
    needed = named[1 : len(named) - len(init.args.defaults)]
    needed += [a.arg for a, d in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if d is None]
    return ScriptTask(node.name, tuple(needed))


def _imports(tree: ast.Module) -> set[str]:
    return {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
