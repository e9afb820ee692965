"""Import the user's file in a worker, up to its own `launch`."""

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
    """A worker that imports the user's file came to the `launch` that started it: nothing after it is its own."""


@dataclass
class _TaskImport:
    earlier: list[str]
    """Run folders of the launches before ours, in their order."""


_current_import: _TaskImport | None = None


def is_importing_task() -> bool:
    """Whether a worker is reading the user's file right now."""
    return _current_import is not None


def next_earlier_run() -> str:
    """Called by `launch` and `join` in a file that a worker imports: an earlier run's folder, or Reached."""
    assert _current_import is not None
    if not _current_import.earlier:
        raise LaunchReached
    return _current_import.earlier.pop(0)


def fetch_definition(where: CodeLocation, earlier: Sequence[str]) -> Any:
    module = _import_module(where.module, earlier) if where.module else _import_file(str(where.file), earlier)
    found: Any = module
    for name in where.name.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise TaskError(f"{where.shown}: there is no {where.name}, or it is defined after the launch that needs it")
    return found


imported_files: dict[str, ModuleType] = {}


def _import_module(name: str, earlier: Sequence[str]) -> ModuleType:
    """A module of the path, up to its own `launch` if it has one: `python -m package.train` without a guard."""
    if name in sys.modules:
        return sys.modules[name]
    above, _, last = name.rpartition(".")
    package = importlib.import_module(above) if above else None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise TaskError(f"there is no module {name!r} on the path")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _until_launch(earlier):  # an import statement would take back what stands before the launch
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    if package is not None:
        setattr(package, last, module)
    return module


@contextmanager
def _until_launch(earlier: Sequence[str]) -> Generator[None]:
    """The body imports the user's code; what it defined before a launch of its own remains."""
    global _current_import
    _current_import = _TaskImport(list(earlier))
    try:
        yield
    except LaunchReached:
        pass
    finally:
        _current_import = None


def _import_file(file: str, earlier: Sequence[str]) -> ModuleType:
    """The user's file under another name, up to its own `launch`."""
    if file in imported_files:
        return imported_files[file]
    name = "unipar_task" if "unipar_task" not in sys.modules else f"unipar_task_{len(imported_files)}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not Path(file).exists():
        raise TaskError(f"the task's file {file} is not there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _until_launch(earlier):
        spec.loader.exec_module(module)
    imported_files[file] = module
    return module
