"""`ObserveSettings`: what is recorded of an observed command, as `--config` gives it and as its processes read it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final, Self

import yaml
from pydantic import PositiveInt, field_validator, model_validator

from unipar.config import Section
from unipar.errors import ConfigError

SETTINGS_VARIABLE: Final = "UNIPAR_OBSERVE"
"""Environment variable that holds the settings of an observed command, as JSON."""


class ObserveSettings(Section):
    """Settings of the recording of an observed command."""

    steps: tuple[PositiveInt, PositiveInt] = (3, 5)
    """First and last step whose memory is recorded."""

    checks: tuple[PositiveInt, ...] = (2, 8, 50, 200, 1000, 5000)
    """Steps after which all weights and optimizer states are compared between the ranks; so is the last one."""

    log_every: PositiveInt = 10
    """Steps from one line of the run log to the next, after the first ten."""

    samples: PositiveInt | None = None
    """Samples in the global batch of a step, which a script does not say; None: no rate is shown."""

    tokens: PositiveInt | None = None
    """Tokens in the global batch of a step; None: no rate is shown."""

    loss: str | None = None
    """File and variable that holds the loss of a step, train.py:loss; None: the tensor given to backward."""

    memory: bool = True
    """Whether memory is recorded."""

    folder: Path = Path("observed")
    """Folder of the results, as an absolute path for the processes."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        first, last = self.steps
        if first > last:
            raise ValueError(f"steps: {first} is after {last}; give the first step and the last one")
        if first < 2:
            raise ValueError("steps: the first step makes the optimizer's states, and cannot be recorded; begin at 2")
        return self

    @field_validator("loss")
    @classmethod
    def _names_a_variable(cls, loss: str | None) -> str | None:
        if loss is not None and re.fullmatch(r".+\.py:[A-Za-z_]\w*", loss) is None:
            raise ValueError(f"{loss!r} names no variable of a file; write it as train.py:loss")
        return loss

    @classmethod
    def from_environment(cls) -> Self:
        """Return the settings of the command that this process belongs to."""
        return cls.model_validate_json(os.environ[SETTINGS_VARIABLE])


def read_settings_file(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file of settings; raise ConfigError if it holds none."""
    try:
        values = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"{file} cannot be read as settings of `unipar observe`: {e}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no keys; give it a mapping, such as steps: [3, 5]")
    return values
