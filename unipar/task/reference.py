"""`TaskRef`: reference to a task's code, from which other processes load it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from unipar.config.config import TaskUse
from unipar.errors import TaskError
from unipar.task.importing import fetch_definition
from unipar.task.location import CodeLocation, find_definition
from unipar.task.pickled import describe_name, is_without_file, pickle_task, unpickle_task
from unipar.task.script_values import ScriptValue, collect_script_values, set_script_values
from unipar.task.task import LOSS_ACROSS, TASK_FUNCTIONS, FunctionTask, Task


@dataclass(frozen=True)
class TaskRef:
    """Place of a task's code and its arguments, sent to workers as JSON."""

    task: CodeLocation | None = None
    functions: Mapping[str, CodeLocation] = field(default_factory=dict[str, CodeLocation])
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: Sequence[str] = ()
    """`sys.path` of the parent."""

    earlier: Sequence[str] = ()
    """Run folders of earlier launches in the same script."""

    argv: Sequence[str] = ()
    """`sys.argv` of the parent: that of the user's script, or the program's name alone under the command line."""

    values: Sequence[ScriptValue] = ()
    """Variables that the task's code reads, as the script has set them."""

    carried: str = ""
    """Names, size and digest of code that is in no file; empty if all code is in files."""

    pickled_task: bytes = field(default=b"", repr=False)
    """Pickled form of that code; sent through a pipe, not as JSON."""

    @classmethod
    def of(
        cls,
        task: type[Task] | None,
        use: TaskUse | None,
        functions: Mapping[str, Callable[..., Any]],
        earlier: Sequence[str] = (),
    ) -> Self:
        """Return the reference to a task class, to functions, or to the config's `task.use`."""
        of_parent: dict[str, Any] = {
            "path": tuple(p or str(Path.cwd()) for p in sys.path),
            "argv": tuple(sys.argv),
            "earlier": tuple(earlier),
        }
        args = use.args if use else {}
        if functions:
            absent = [name for name in TASK_FUNCTIONS[:3] if name not in functions]
            if task is not None or absent:
                way = "a task and functions were both given" if task is not None else f"{absent[0]}= is missing"
                raise TaskError(f"{way}: give a task, or model=, loss= and data=")
            if any(is_without_file(f) for f in functions.values()):
                names = ", ".join(f"{name}={describe_name(f)}" for name, f in functions.items())
                return cls(**of_parent).with_pickled(names, dict(functions))
            locations = {name: CodeLocation.of(f) for name, f in functions.items()}
            return cls(functions=locations, values=collect_script_values([*functions.values()]), **of_parent)
        if task is not None and is_without_file(task):
            _check_task_class(task, describe_name(task))
            return cls(args=args, **of_parent).with_pickled(describe_name(task), task)
        if task is not None:
            return cls(CodeLocation.of(task), args=args, values=collect_script_values([task]), **of_parent)
        if use is not None and use.use is None:
            raise TaskError(
                f"task.args ({', '.join(use.args)}) are given, and no task: set task.use: file.py:Class in the config, "
                "or pass the class from a script: launch(..., task=Class)"
            )
        if use is None or use.use is None:
            raise TaskError(
                "there is no task: set task.use in the config, or pass task=, or model=, loss= and data=, to launch"
            )
        location = CodeLocation.from_config(use.use)
        known = find_definition(location)
        values = collect_script_values([] if known is None else [known])
        return cls(location, args=args, values=values, **of_parent)

    def with_pickled(self, names: str, thing: Any) -> Self:
        """Return this reference with code that other processes cannot import, pickled."""
        pickled_task = pickle_task(names, thing)
        carried = f"{names}: {len(pickled_task)} bytes, {hashlib.sha256(pickled_task).hexdigest()[:16]}"
        return replace(self, carried=carried, pickled_task=pickled_task)

    def to_json(self) -> dict[str, Any]:
        """Return the reference as JSON data, without the pickled code."""
        return {key: value for key, value in asdict(replace(self, pickled_task=b"")).items() if key != "pickled_task"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the reference that `to_json` wrote."""
        return cls(
            task=CodeLocation(**data["task"]) if data["task"] else None,
            functions={k: CodeLocation(**v) for k, v in data["functions"].items()},
            args=data["args"],
            path=tuple(data["path"]),
            argv=tuple(data["argv"]),
            values=tuple((module, name, value) for module, name, value in data["values"]),
            earlier=tuple(data["earlier"]),
            carried=data["carried"],
        )

    def check_code(self) -> None:
        """Raise TaskError if reading the code without importing it shows that the task cannot be loaded."""
        from unipar.task.source_checks import check_task_code

        if self.task is not None:
            check_task_code(self.task, self.args, self.path)

    def load(self) -> Task:
        """Import the user's code with the arguments of the script, give it the script's values; return the task."""
        sys.path[:0] = [p for p in self.path if p not in sys.path]
        sys.argv = list(self.argv) or sys.argv
        if self.carried:
            thing = unpickle_task()
            return FunctionTask(thing) if isinstance(thing, dict) else _create_task(thing, self.args, thing.__name__)
        if self.functions:
            functions = {name: fetch_definition(where, self.earlier) for name, where in self.functions.items()}
            set_script_values(self.values)
            return FunctionTask(functions)
        assert self.task is not None
        definition = fetch_definition(self.task, self.earlier)
        set_script_values(self.values)
        return _create_task(definition, self.args, self.task.shown)


def _create_task(definition: Any, args: Mapping[str, Any], shown: str) -> Task:
    _check_task_class(definition, shown)
    try:
        return definition(**args)
    except TypeError as e:
        # without a next frame the call itself failed, not the constructor's body
        if e.__traceback__ is not None and e.__traceback__.tb_next is None:
            raise TaskError(f"task.args do not fit {definition.__name__}: {e}") from None
        raise


def _check_task_class(definition: Any, shown: str) -> None:
    if not (isinstance(definition, type) and issubclass(definition, Task)):
        raise TaskError(f"{shown} is {definition!r}; it must be a class that derives from unipar.Task")
    lacking = {*getattr(definition, "__abstractmethods__", ())}
    if definition.loss is Task.loss:  # it stands for the two methods of a loss across the batch
        other = {name for name in LOSS_ACROSS if getattr(definition, name) is getattr(Task, name)}
        lacking |= {"loss"} if len(other) == len(LOSS_ACROSS) else other
    unwritten = sorted(lacking)
    if unwritten:
        raise TaskError(f"{shown} does not have {', '.join(f'{m}()' for m in unwritten)}")
