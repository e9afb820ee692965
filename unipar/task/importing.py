"""Import of the user's file in a worker, up to the `launch` that started the worker."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from unipar.errors import TaskError
from unipar.task.location import CodeLocation


class LaunchReached(BaseException):
    """Exception that ends a worker's import at the `launch` that started it: later code is for the parent alone."""


@dataclass
class _TaskImport:
    earlier: list[str]
    """Run folders of the launches that come before it in the file, in order."""


_current_import: _TaskImport | None = None


def is_importing_task() -> bool:
    """Return whether this process is a worker that is importing the user's file."""
    return _current_import is not None


def next_earlier_run() -> str:
    """Return the run folder of the next earlier launch; raise LaunchReached if this launch started the worker.

    Called by `launch` and `join` in a file that a worker imports.
    """
    assert _current_import is not None
    if not _current_import.earlier:
        raise LaunchReached
    return _current_import.earlier.pop(0)


def fetch_definition(where: CodeLocation, earlier: Sequence[str]) -> Any:
    """Return the class or function at `where`; `earlier` holds the run folders of earlier launches in its file."""
    module = _import_module(where.module, earlier) if where.module else _import_file(str(where.file), earlier)
    definition: Any = module
    for name in where.name.split("."):
        definition = getattr(definition, name, None)
        if definition is None:
            raise TaskError(f"{where.shown}: there is no {where.name}, or it is defined after the launch that needs it")
    return definition


imported_files: dict[str, ModuleType] = {}
"""Modules that were imported from a file, by its path."""


def _import_module(name: str, earlier: Sequence[str]) -> ModuleType:
    """Import a module by name, up to the `launch` in it, as in `python -m package.train` without a main guard."""
    if name in sys.modules:
        return sys.modules[name]
    above, _, last = name.rpartition(".")
    package = importlib.import_module(above) if above else None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise TaskError(f"there is no module {name!r} on the path; install it, or write file.py:Class")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _until_launch(earlier):  # an import statement would discard what was defined before the launch
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    if package is not None:
        setattr(package, last, module)
    return module


@contextmanager
def _until_launch(earlier: Sequence[str]) -> Generator[None]:
    """Context manager: end an import of user code at its `launch`, and keep what was defined before."""
    global _current_import
    _current_import = _TaskImport(list(earlier))
    try:
        yield
    except LaunchReached:
        pass
    finally:
        _current_import = None


def _import_file(file: str, earlier: Sequence[str]) -> ModuleType:
    """Import a file under the module name `unipar_task`, up to the `launch` in it."""
    if file in imported_files:
        return imported_files[file]
    name = "unipar_task" if "unipar_task" not in sys.modules else f"unipar_task_{len(imported_files)}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not Path(file).exists():
        raise TaskError(f"the task's file {file} does not exist; name it in task.use")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _until_launch(earlier):
        spec.loader.exec_module(module)
    imported_files[file] = module
    return module
