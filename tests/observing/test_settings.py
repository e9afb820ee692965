"""Settings of an observed command: from a file, from the command line, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from unipar.errors import ConfigError
from unipar.observing.settings import SETTINGS_VARIABLE, ObserveSettings, read_settings_file


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"steps": (5, 3)}, "steps: 5 is after 3; give the first step and the last one"),
        ({"steps": (1, 3)}, "the first step makes the optimizer's states, and cannot be recorded; begin at 2"),
        ({"loss": "loss"}, "'loss' names no variable of a file; write it as train.py:loss"),
    ],
    ids=["order", "first step", "loss"],
)
def test_a_setting_that_cannot_be(values: dict[str, object], says: str) -> None:
    """The reason and the way out are named."""
    with pytest.raises(ValidationError, match=says):
        ObserveSettings.model_validate(values)


def test_settings_travel_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process reads what the command has written into its environment."""
    settings = ObserveSettings(steps=(4, 6), loss="train.py:loss", samples=64)
    monkeypatch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
    assert ObserveSettings.from_environment() == settings


def test_a_file_without_keys(tmp_path: Path) -> None:
    """A file that is no mapping is refused with an example."""
    (tmp_path / "observe.yaml").write_text("3", "utf-8")
    with pytest.raises(ConfigError, match=r"observe.yaml holds no keys; give it a mapping, such as steps: \[3, 5\]"):
        read_settings_file(tmp_path / "observe.yaml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Its name is in the message."""
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read as settings of `unipar observe`: .*No such file"):
        read_settings_file(tmp_path / "none.yaml")
