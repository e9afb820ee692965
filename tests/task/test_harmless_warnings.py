"""Warnings of libraries that a task imports: those on which nothing depends are not printed, all others are."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from unipar.task.harmless_warnings import silence_harmless_warnings


def test_peft_is_imported_quietly() -> None:
    """A process that imports a task imports unipar's first: nothing is printed of kernels for other machines."""
    done = subprocess.run(
        [sys.executable, "-c", "from unipar import Task\nimport peft"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("logger", "message", "heard"),
    [
        ("torchao", "Failed to load /x/torchao/_C_mxfp8.so: Could not load this library: /x/torchao", False),
        ("torchao", "Failed to load /x/torchao/_C_mxfp8.so: out of memory", True),
        ("torchao", "Skipping import of cpp extensions", True),
        ("torch.utils._pytree", "<enum 'KernelPreference'> is an Enum subclass and is now natively supported", False),
        ("torch.utils._pytree", "<enum 'Mine'> is an Enum subclass and is now natively supported", True),
    ],
)
def test_others_are_heard(logger: str, message: str, heard: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A library that fails for another reason says so, and so does a class of the user's own."""
    silence_harmless_warnings()
    logging.getLogger(logger).addHandler(caplog.handler)
    logging.getLogger(logger).warning(message)
    logging.getLogger(logger).removeHandler(caplog.handler)
    assert set(caplog.messages) == ({message} if heard else set())
