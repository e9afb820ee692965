"""Warnings that are not printed, as nothing depends on them: those of torchao, which peft imports."""

from __future__ import annotations

import logging
import re
from typing import Final

_HARMLESS: Final = {
    "torchao": r"Failed to load .*/torchao/_C\S*\.so: Could not load this library",  # kernels of GPUs that are not here
    "torch.utils._pytree": r"<enum '(KernelPreference|ScaleCalculationMode)'> is an Enum subclass",  # torchao's
}
"""Pattern of the harmless warnings by name of the logger; all others are printed."""


def silence_harmless_warnings() -> None:
    """Filter the harmless warnings out of what their loggers print, in this process."""
    for name in _HARMLESS:
        logging.getLogger(name).addFilter(_is_printed)


def _is_printed(record: logging.LogRecord) -> bool:
    return re.match(_HARMLESS[record.name], record.getMessage()) is None
