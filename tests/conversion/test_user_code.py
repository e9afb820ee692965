"""The user's file without unipar: what is taken off, what goes along, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.conversion.user_code import extract_user_code
from unipar.errors import TaskError

WHOLE = '''"""A task."""

import sys
from pathlib import Path

import torch
import unipar
from helper import width
from unipar import Task


@some.decorator
class Mine(
    unipar.Task,
):
    # a comment stays
    def __init__(self):
        super().__init__()


class Other(Mixin, Task, metaclass=Meta):
    pass


if __name__ == "__main__":
    print(unipar.launch(Path("x.yaml"), task=Mine, overwrite="--overwrite" in sys.argv))
'''
PLAIN = '''"""A task."""

import torch
from helper import width


@some.decorator
class Mine:
    # a comment stays
    def __init__(self):
        super().__init__()


class Other(Mixin, metaclass=Meta):
    pass
'''


def put(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_the_text_stays_the_users(tmp_path: Path) -> None:
    """Only unipar, the `__main__` block and imports that they needed go; a module in the same folder is included."""
    put(tmp_path, "import os\n\nwidth = 3\n", "helper.py")
    made = extract_user_code(put(tmp_path, WHOLE), "Mine")
    assert made == {"task.py": PLAIN, "helper.py": "import os\n\nwidth = 3\n"}


def test_a_launch_without_a_guard_ends_the_file(tmp_path: Path) -> None:
    """The file ends before the launch, as for a worker."""
    text = "import unipar\nclass A(unipar.Task): ...\nreport = unipar.launch({}, task=A)\nprint(report)\n"
    assert extract_user_code(put(tmp_path, text), "A") == {"task.py": "class A: ...\n"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import unipar\nclass A(unipar.Task):\n    x = unipar.backend.registry.names()\n",
            "line 3: it uses unipar.backend.registry.names, and a script has no unipar: write out what it does",
        ),
        (
            "import unipar\nclass A(unipar.Task):\n    def collate(self, s):\n        return super().collate(s)\n",
            "line 4: super() calls unipar.Task, which a script does not have: write out what it does",
        ),
        (
            "import unipar\nclass A(unipar.Task):\n    def data(self):\n        return open(__file__)\n",
            "line 4: it reads __file__, which is another path in a script: give the path by task.args",
        ),
        (
            "def f():\n    from unipar.utils.seeding import mix\n",
            "line 2: it imports unipar inside a function; a script has no unipar",
        ),
        ("import os, unipar\n", "line 1: it imports unipar and others in one statement: give each a line of its own"),
        (
            "from . import x\n",
            "line 1: a relative import; a script can include single files only: import the module by its name",
        ),
        (
            "import samples\n",
            "line 1: it imports samples.py, and a script has a file of that name itself: rename yours",
        ),
        (
            "import package\n",
            "line 1: the package package is in the same folder, and a script can include single files only: "
            "install the package, or import what is needed from one file",
        ),
        ("class A(:\n", "line 1: invalid syntax"),
    ],
)
def test_refused(text: str, sentence: str, tmp_path: Path) -> None:
    """The file, the line, and the way out."""
    put(tmp_path, "", "samples.py")
    (tmp_path / "package").mkdir()
    put(tmp_path / "package", "", "__init__.py")
    file = put(tmp_path, text)
    with pytest.raises(TaskError) as e:
        extract_user_code(file, "A")
    assert str(e.value) == f"{file}, {sentence}"


def test_a_module_beside_that_uses_unipar(tmp_path: Path) -> None:
    """A module in the same folder is refused as the task's own file is."""
    beside = put(tmp_path, "import unipar\nx = unipar.Task\n", "helper.py")
    with pytest.raises(TaskError) as e:
        extract_user_code(put(tmp_path, "import helper\n"), "A")
    assert str(e.value) == f"{beside}, line 2: it uses unipar.Task, and a script has no unipar: write out what it does"
