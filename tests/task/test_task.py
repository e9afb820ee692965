"""Places of a task's code: found by path, checked without importing, refused in a sentence."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import tasks
from unipar.config.config import TaskUse
from unipar.errors import TaskError
from unipar.task import Task
from unipar.task.importing import LaunchReached, is_importing_task, next_earlier_run
from unipar.task.location import CodeLocation
from unipar.task.reference import TaskRef

GOOD = """
import unipar

class Base(unipar.Task):
    def model(self): ...
    def data(self): ...

class Mine(Base):
    def __init__(self, width, depth=2, *, seed=0): ...
    def loss(self, model, batch): ...

class Lacking(unipar.Task):
    def model(self): ...
"""


def _ref(tmp_path: Path, text: str, name: str, **args: Any) -> TaskRef:
    file = tmp_path / "mine.py"
    file.write_text(text, "utf-8")
    return TaskRef.of(None, TaskUse(use=f"{file}:{name}", args=args), {})


def test_look_sees_a_whole_class(tmp_path: Path) -> None:
    """Methods of a base in the same file count."""
    _ref(tmp_path, GOOD, "Mine", width=3).check_code()


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Mime", {}, "task.use: {file} has no class Mime; did you mean Mine?"),
        ("Zebra", {}, "task.use: {file} has no class Zebra; its classes: Base, Mine, Lacking"),
        ("Lacking", {}, "task.use: Lacking in {file} does not have data(), loss()"),
        ("Mine", {"witdh": 3}, "task.args.witdh: Mine has no such argument; did you mean 'width'?"),
        ("Mine", {"depth": 3}, "task.args: Mine needs width"),
    ],
)
def test_look_refuses(tmp_path: Path, name: str, args: dict[str, Any], message: str) -> None:
    """The error for a missing class, method or argument names those that exist."""
    with pytest.raises(TaskError) as e:
        _ref(tmp_path, GOOD, name, **args).check_code()
    assert str(e.value) == message.format(file=tmp_path / "mine.py")


MISSPELT = """
import unipar
class {name}(unipar.Task):
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): return self.losses(batch)
    def losses(self, batch): ...
    def {method}(self, batch): ...
"""


@pytest.mark.parametrize(
    ("method", "near"), [("weights", "weight"), ("validate", "validation"), ("optimiser", "optimizer")]
)
def test_a_misspelt_method(tmp_path: Path, method: str, near: str) -> None:
    """A method that nobody calls is refused when its file is read, and when its class is made; a helper is not."""
    text = MISSPELT.format(name="Mine", method=method)
    sentence = f"{method} is never called; did you mean {near}? Call a helper of your own _{method}"
    with pytest.raises(TaskError) as e:
        _ref(tmp_path, text, "Mine").check_code()
    assert str(e.value) == f"task.use: Mine in {tmp_path / 'mine.py'}: {sentence}"
    with pytest.raises(TaskError) as e:
        exec(text, {})
    assert str(e.value) == f"Mine.{sentence}"


def test_a_helper_may_have_any_name(tmp_path: Path) -> None:
    """A method that the task itself calls is its own."""
    text = MISSPELT.format(name="Mine", method="weights") + "    def weight(self, batch): return self.weights(batch)\n"
    _ref(tmp_path, text, "Mine").check_code()
    exec(text, {})


VALID = """
import unipar
from train import Sum as B

def make(self): ...

class A(B):
    def data(self): ...
class B(A):
    def loss(self, model, batch): ...

class Whole(unipar.Task):
    model = data = make
    loss: object = make

Alias = Whole
Other: type = Whole
"""


@pytest.mark.parametrize("name", ["A", "B", "Whole", "Alias", "Other"])
def test_look_takes_what_only_python_can_tell(tmp_path: Path, name: str) -> None:
    """Bases that are defined again, and methods and classes that are assigned, are accepted."""
    _ref(tmp_path, VALID, name).check_code()


def test_look_reads_the_encoding_that_a_file_names(tmp_path: Path) -> None:
    """A file's own encoding is used; bytes that are not text are refused in a sentence."""
    file = tmp_path / "mine.py"
    ref = _ref(tmp_path, "", "Mine", width=3)
    file.write_bytes("# -*- coding: latin-1 -*-\n# Grün\n".encode("latin-1") + GOOD.encode())
    ref.check_code()
    for held in (b"x = '\xfc'\n", b"x = 1\0\n"):
        file.write_bytes(held)
        with pytest.raises(TaskError) as e:
            ref.check_code()
        assert str(e.value).startswith(str(file))


def test_look_at_what_is_not_there(tmp_path: Path) -> None:
    """A missing file, a missing module and a wrong `task.use` are refused."""
    with pytest.raises(
        TaskError, match=r"^task.use: the file .*absent.py does not exist; the path is relative to the config$"
    ):
        TaskRef.of(None, TaskUse(use=f"{tmp_path}/absent.py:Mine"), {}).check_code()
    with pytest.raises(
        TaskError, match=r"^task.use: there is no module 'no.such' on the path; install it, or write file.py:Class$"
    ):
        TaskRef.of(None, TaskUse(use="no.such:Mine"), {}).check_code()
    with pytest.raises(TaskError, match=r"^task.use: 'mine.py' should be file.py:Class or package.module:Class$"):
        TaskRef.of(None, TaskUse(use="mine.py"), {})


def test_look_names_the_line_of_a_syntax_error(tmp_path: Path) -> None:
    """The line of a syntax error is named."""
    with pytest.raises(TaskError) as e:
        _ref(tmp_path, "import os\ndef broken(:\n", "Mine").check_code()
    assert str(e.value) == f"{tmp_path / 'mine.py'}, line 2: invalid syntax"


def test_load_stops_at_the_launch_that_started_it(tmp_path: Path) -> None:
    """A worker runs the code before the launch that started it, and none after it."""
    text = """
import unipar
from unipar.task.importing import next_earlier_run

class Mine(unipar.Task):
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...

first = next_earlier_run()
next_earlier_run()
raise SystemExit("a worker came past its own launch")
"""
    ref = _ref(tmp_path, text, "Mine")
    ref = TaskRef(ref.task, {}, {}, ref.path, earlier=("runs/first",))
    made = ref.load()
    assert type(made).__name__ == "Mine"
    assert sys.modules[type(made).__module__].first == "runs/first"
    assert not is_importing_task()


def test_load_of_a_module_stops_at_its_launch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without a main guard is imported up to its launch, and stays part of its package."""
    text = (
        GOOD
        + "from unipar.task.importing import next_earlier_run\n"
        + "next_earlier_run()\nraise SystemExit('past its own launch')\n"
    )
    (tmp_path / "apkg").mkdir()
    (tmp_path / "apkg/__init__.py").touch()
    (tmp_path / "apkg/train.py").write_text(text, "utf-8")
    for name in ("apkg", "apkg.train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    ref = TaskRef(CodeLocation("Mine", module="apkg.train"), {}, {"width": 3}, (str(tmp_path),))
    assert type(ref.load()).__module__ == "apkg.train"
    assert sys.modules["apkg"].train is sys.modules["apkg.train"]
    assert not is_importing_task()
    for name in ("apkg", "apkg.train"):
        del sys.modules[name]


def test_load_of_a_module_that_fails(tmp_path: Path) -> None:
    """An error during the import is raised and the module removed; a missing module is refused."""
    (tmp_path / "abad.py").write_text("1 / 0\n", "utf-8")
    with pytest.raises(ZeroDivisionError):
        TaskRef(CodeLocation("Mine", module="abad"), path=(str(tmp_path),)).load()
    assert "abad" not in sys.modules
    with pytest.raises(
        TaskError, match=r"^there is no module 'nowhere_at_all' on the path; install it, or write file.py:Class$"
    ):
        TaskRef(CodeLocation("Mine", module="nowhere_at_all")).load()


def test_load_refuses(tmp_path: Path) -> None:
    """Objects that are not a task, incomplete tasks and wrong arguments are refused."""
    with pytest.raises(TaskError, match=r"mine.py:helper is 7; it must be a class that derives from unipar.Task$"):
        _ref(tmp_path, "helper = 7", "helper").load()
    (tmp_path / "b").mkdir()
    with pytest.raises(TaskError, match=r"mine.py:Lacking does not have data\(\), loss\(\)$"):
        _ref(tmp_path / "b", GOOD, "Lacking").load()
    with pytest.raises(TaskError, match=r"^task.args do not fit Mine: .*unexpected keyword argument 'hight'$"):
        _ref(tmp_path / "b", GOOD, "Mine", hight=3).load()


def test_a_launch_outside_of_an_import_is_a_bug_of_ours() -> None:
    """`next_earlier_run` fails an assertion outside of a worker's import."""
    with pytest.raises(AssertionError):
        next_earlier_run()
    assert issubclass(LaunchReached, BaseException)
    assert not issubclass(LaunchReached, Exception)


def test_what_other_processes_cannot_find() -> None:
    """A local function is refused, because other processes cannot import it."""

    def local() -> None: ...

    with pytest.raises(TaskError) as e:
        CodeLocation.of(local)
    assert str(e.value) == (
        "'test_what_other_processes_cannot_find.<locals>.local' cannot be found by other processes: "
        "define it at the top level of a file, by def or class"
    )


def test_a_prompt_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a module without a file is refused."""
    made = type("Mine", (), {"__module__": "prompt"})
    monkeypatch.setitem(sys.modules, "prompt", type(sys)("prompt"))
    with pytest.raises(TaskError) as e:
        CodeLocation.of(made)
    assert str(e.value) == (
        "Mine was defined in a prompt, a notebook or a -c command, where other processes cannot find it: "
        "put it into a file and import it from there"
    )


def test_a_task_or_functions() -> None:
    """Exactly one of a task and a complete set of functions is accepted."""
    with pytest.raises(TaskError, match=r"^data= is missing: give a task, or model=, loss= and data=$"):
        TaskRef.of(None, None, {"model": test_a_task_or_functions, "loss": test_a_task_or_functions})
    functions: dict[str, Any] = dict.fromkeys(("model", "loss", "data"), test_a_task_or_functions)
    with pytest.raises(TaskError, match=r"^a task and functions were both given: "):
        TaskRef.of(Task, None, functions)
    with pytest.raises(TaskError, match=r"^there is no task: set task.use in the config, or pass task=, or model="):
        TaskRef.of(None, None, {})


def test_arguments_for_a_class_that_a_script_passes() -> None:
    """The config's task.args go to the class of task=; without it the error names both ways out."""
    use = TaskUse(args={"width": 64})
    assert TaskRef.of(tasks.Plain, use, {}).args == {"width": 64}
    said = (
        r"^task.args \(width\) are given, and no task: set task.use: file.py:Class in the config, or pass the class "
        r"from a script: launch\(..., task=Class\)$"
    )
    with pytest.raises(TaskError, match=said):
        TaskRef.of(None, use, {})


def test_refs_travel_as_json() -> None:
    """A reference that is written as JSON and read back is unchanged."""
    ref = TaskRef(CodeLocation("Mine", file="/x/mine.py"), {}, {"width": 3}, ("/x",), ("runs/a",))
    assert TaskRef.from_json(ref.to_json()) == ref


def test_a_reference_without_arguments_keeps_those_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sys.argv is the script's where the reference has it."""
    monkeypatch.setattr(sys, "argv", ["here"])
    ref = _ref(tmp_path, GOOD, "Mine", width=3)
    replace(ref, argv=()).load()
    assert sys.argv == ["here"]
    replace(ref, argv=("there", "--width", "16")).load()
    assert sys.argv == ["there", "--width", "16"]
