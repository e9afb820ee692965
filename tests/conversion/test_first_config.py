"""`unipar init`: a first config for the task in a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.backend.checks import read_source
from unipar.cli.commands.config.check import check_config
from unipar.cli.commands.config.init import init
from unipar.conversion.config_schema import schema_text
from unipar.conversion.first_config import write_first_config
from unipar.errors import ConfigError, OutExists, TaskError

TASK = """
class Net:
    def __init__(self, width, depth=2): ...
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...
"""


def test_a_first_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config lies beside the script, names its class and what that needs, and `check` accepts it."""
    script = tmp_path / "train.py"
    script.write_text(TASK.replace("width, ", "") + TASK.replace("Net", "Other"), encoding="utf-8")
    init(script)
    written = tmp_path / "train.yaml"
    told = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
    assert told == [
        "written: train.yaml, and unipar.schema.json for editors",
        "next:",
        "  unipar check train.yaml    # would it start?",
        "  unipar run train.yaml      # train",
        "  unipar compare train.yaml  # the same training in every strategy, as a table",
    ]
    assert "  # Others in this file: Other." in written.read_text("utf-8").splitlines()
    source = read_source(written)
    assert source.config.task is not None
    assert str(source.config.task.use).endswith("train.py:Net")
    assert "good" in check_config(source)


def test_the_schema_that_it_names(tmp_path: Path) -> None:
    """An editor finds the file that the config's first line names."""
    (tmp_path / "train.py").write_text(TASK, encoding="utf-8")
    init(tmp_path / "train.py")
    first = (tmp_path / "train.yaml").read_text("utf-8").splitlines()[0]
    named = tmp_path / first.removeprefix("# yaml-language-server: $schema=")
    assert named.read_text("utf-8") == schema_text()


def test_what_the_class_needs(tmp_path: Path) -> None:
    """Arguments without a default are a comment to be filled in."""
    (tmp_path / "train.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "configs").mkdir()
    out = write_first_config(tmp_path / "train.py", tmp_path / "configs/a.yaml")
    lines = out.read_text("utf-8").splitlines()
    assert '  use: "../train.py:Net"' in lines
    assert "  # args: {width: ...}    # Net needs this: give values, and take the first # away" in lines


def test_an_existing_file_stays(tmp_path: Path) -> None:
    """A config that is there is written over only when asked."""
    (tmp_path / "train.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "train.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(OutExists, match="it already exists; name another file"):
        write_first_config(tmp_path / "train.py")
    assert (tmp_path / "train.yaml").read_text("utf-8") == "mine"
    write_first_config(tmp_path / "train.py", overwrite=True)
    assert "First config" in (tmp_path / "train.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "import argparse\ndef model(): ...\nclass Config: ...\n",
            "train.py: no class in it has model(), data() and loss(): it has the function model(), the class Config; "
            "write one that has them (`python -m pydoc unipar.Task`); what argparse reads becomes arguments of that "
            "class, then `unipar init train.py` again",
        ),
        (
            "x = 1\n",
            "train.py: no class in it has model(), data() and loss(): it has no class; write one that has them "
            "(`python -m pydoc unipar.Task`), then `unipar init train.py` again",
        ),
        ("x = (\n", "train.py, line 1: '(' was never closed"),
    ],
)
def test_a_script_without_a_task(text: str, wrong: str, tmp_path: Path) -> None:
    """What it has instead, and what to write."""
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    with pytest.raises(TaskError) as e:
        write_first_config(tmp_path / "train.py")
    assert str(e.value).replace(f"{tmp_path}/", "") == wrong


def test_a_folder(tmp_path: Path) -> None:
    """The one script with a task in it is taken; none, or two, is a sentence, as is a file that is not there."""
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as e:
        write_first_config(folder)
    assert str(e.value) == (
        f"{folder}: a folder with no script with a task among 1 Python file; name one script, such as train.py"
    )
    (folder / "b.py").write_text(TASK, encoding="utf-8")
    assert write_first_config(folder) == folder / "b.yaml"
    (folder / "c.py").write_text(TASK, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a folder with 2 scripts with a task \(b\.py, c\.py\); name one script"):
        write_first_config(folder)
    with pytest.raises(ConfigError, match="there is no such file; name the script with your task"):
        write_first_config(folder / "d.py")
