"""Training arguments as they are given: a .json or .yaml file, a command line, and axolotl's names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unipar.config.config_file import read_mapping_file
from unipar.conversion.argument_names import AXOLOTL_DEFAULTS, AXOLOTL_NAMES, READ_ARGUMENTS, TRAINER_DEFAULTS
from unipar.conversion.training_arguments import RefusedArgument, TrainingArguments
from unipar.errors import ConfigError
from unipar.utils.text import show_value


def arguments_of(values: Mapping[str, Any], source: str, elsewhere: frozenset[str] = frozenset()) -> TrainingArguments:
    """Return arguments as given, with axolotl's names put into the Trainer's."""
    values = {name: _without_class(value) for name, value in values.items()}
    renamed = {name: AXOLOTL_NAMES.get(name, name) for name in values if not isinstance(values[name], dict)}
    ours = {renamed.get(name, name): value for name, value in values.items()}
    names = {new: old for old, new in renamed.items() if new != old}
    twice = [name for new, name in names.items() if values.get(new, values[name]) != values[name]]
    axolotl = "base_model" in values or "micro_batch_size" in values or "num_epochs" in values
    defaults = {**TRAINER_DEFAULTS, **AXOLOTL_DEFAULTS} if axolotl else TRAINER_DEFAULTS
    arguments = TrainingArguments(ours, source, names, defaults, elsewhere)
    for name in twice:
        why = f"{show_value(values[name])}, but {AXOLOTL_NAMES[name]} is {show_value(values[AXOLOTL_NAMES[name]])}"
        arguments.refused.append(RefusedArgument(name, why, "leave one of them out"))
    return arguments


def _without_class(value: Any) -> Any:
    """Return the value of an enumeration's member that was written as text, such as `SchedulerType.COSINE`."""
    member = _MEMBER.fullmatch(value) if isinstance(value, str) else None
    return value if member is None else _VALUE_OF_MEMBER.get(member[1], member[1].lower())


_MEMBER = re.compile(r"(?:[A-Z][A-Za-z]*Strategy|SchedulerType|OptimizerNames)\.([A-Z][A-Z0-9_]*)")
_VALUE_OF_MEMBER = {
    "ADAMW_BNB": "adamw_bnb_8bit",
    "PAGED_ADAMW": "paged_adamw_32bit",
    "REDUCE_ON_PLATEAU": "reduce_lr_on_plateau",
}
"""Values of members whose value is not their name."""


def arguments_over(file: Mapping[str, Any], over: Mapping[str, Any], elsewhere: frozenset[str]) -> TrainingArguments:
    """Return the arguments in a file, over which those given beside it win."""
    kept = {name: value for name, value in file.items() if AXOLOTL_NAMES.get(name, name) not in over}
    return arguments_of({**kept, **over}, "", elsewhere)


def knows_argument(name: str) -> bool:
    """Return whether the Trainer, or axolotl, has an argument of training by this name."""
    return name in READ_ARGUMENTS or name in AXOLOTL_NAMES


def read_arguments(text: str | None) -> TrainingArguments:
    """Return the arguments in a JSON or YAML file, or on a command line such as `--learning_rate 1e-4`."""
    if text is None:
        return TrainingArguments({})
    words = text.strip()
    if words.startswith("--"):
        return arguments_of(_parse_command_line(words), "--args")
    file = Path(words)
    if file.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(
            f"--args {words}: give a .json or .yaml file of training arguments, or the arguments themselves: "
            "--args '--learning_rate 1e-4 --num_train_epochs 2'"
        )
    data, _ = read_mapping_file(file, "a mapping of training arguments is wanted")
    return arguments_of({str(k): v for k, v in data.items()}, file.name)


def _parse_command_line(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ConfigError(f"--args: {e}; close every quotation mark") from None
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if equals else True
        elif values.get(name) is True:
            values[name] = word
        else:
            values[name] = f"{values[name]} {word}"
    return values
