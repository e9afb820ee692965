"""`CodeLocation`: place of a class or function, as module or file, and name."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unipar.errors import TaskError
from unipar.task.task import FunctionTask, Task


@dataclass(frozen=True)
class CodeLocation:
    """Place of a class or function that another process can import."""

    name: str
    module: str | None = None
    file: str | None = None

    @classmethod
    def of(cls, thing: Any) -> Self:
        """Return the location of a class or function; raise TaskError if other processes cannot import it."""
        name, module = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", "")
        if not name or "<" in name:
            raise TaskError(
                f"{name or thing!r} cannot be found by other processes: "
                "define it at the top level of a file, by def or class"
            )
        module_name, file = module_place(module)
        if module_name is not None:
            return cls(name, module=module_name)
        if file is None:
            raise TaskError(
                f"{name} was defined in a prompt, a notebook or a -c command, where other processes cannot find it: "
                "put it into a file and import it from there"
            )
        return cls(name, file=file)

    @classmethod
    def from_config(cls, use: str) -> Self:
        """Return the location written in a config as `file.py:Class` or `package.module:Class`."""
        place, colon, name = use.rpartition(":")
        if not colon or not name.isidentifier() or not place:
            raise TaskError(f"task.use: {use!r} should be file.py:Class or package.module:Class")
        if place.endswith(".py") or "/" in place:
            return cls(name, file=str(Path(place).resolve()))
        return cls(name, module=place)

    @property
    def shown(self) -> str:
        """Location as `file.py:name` or `module:name`."""
        return f"{self.file or self.module}:{self.name}"


def module_place(name: str) -> tuple[str | None, str | None]:
    """Return the name or the file from which other processes import a module of this one; twice None if neither."""
    here = sys.modules.get(name)
    spec = getattr(here, "__spec__", None)
    if name != "__main__" and spec is not None and importlib.util.find_spec(name) is not None:
        return name, None
    if name == "__main__" and spec is not None:
        return spec.name, None  # python -m package.module
    file = getattr(here, "__file__", None)
    return None, str(Path(file).resolve()) if file is not None and Path(file).exists() else None


def find_definition(where: CodeLocation) -> Any:
    """Return the class or function at this place if its module is imported in this process, else None."""
    value: Any = next((m for name, m in list(sys.modules.items()) if _is_at(name, where)), None)
    for step in where.name.split("."):
        value = getattr(value, step, None)
    return value


def _is_at(name: str, where: CodeLocation) -> bool:
    """Return whether a module is the one at this place: by its name, or as the script that runs."""
    if where.module is not None:
        return name == where.module
    return name == "__main__" and module_place(name)[1] == where.file


def code_folder(task: Task) -> Path:
    """Return the folder of the file in which a task's loss is written, or the working directory if it is in no file."""
    file = _code_file(task, "loss")
    return Path.cwd() if file is None else file.parent


def code_hash(task: Task) -> str | None:
    """Return the SHA-256 of the files in which a task's loss and model are written, or None if they are in no file."""
    files = {file for method in ("loss", "model") if (file := _code_file(task, method)) is not None}
    if not files:
        return None
    return hashlib.sha256(b"".join(sorted(file.read_bytes() for file in files))).hexdigest()


def _code_file(task: Task, method: str) -> Path | None:
    function = task.functions[method] if isinstance(task, FunctionTask) else getattr(type(task), method)
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = Path(code.co_filename) if code is not None else Path("<unknown>")
    return file.resolve() if file.exists() else None
