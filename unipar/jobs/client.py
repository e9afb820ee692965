"""Calls of a job system's own client: its answer, or a sentence on why there is none."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence

from unipar.errors import UniparError

SECONDS_FOR_ANSWER = 60.0
"""Seconds that a client may take to answer."""


class ClientFailed(UniparError):
    """Error for a job system's client that refused, or did not answer."""


def ask_client(command: Sequence[str], stdin: str | None = None) -> str:
    """Return what a client printed; raise ClientFailed with its own words if it failed. `stdin` is its input."""
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_FOR_ANSWER,
        )
    except FileNotFoundError:
        raise ClientFailed(f"{command[0]} not found here") from None
    except subprocess.TimeoutExpired:
        raise ClientFailed(f"{shown}: no answer within {SECONDS_FOR_ANSWER:g} s") from None
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ClientFailed(f"{shown}: {output}")
    return done.stdout


def unset_variables(names: Iterable[str], key: str) -> str:
    """Return a sentence on the variables among `names` that the environment lacks, or ""; `key` names them."""
    unset = [name for name in names if name not in os.environ]
    them = "it" if len(unset) == 1 else "them"
    return f"{key}: {', '.join(unset)} not set here; export {them}, or leave {them} out" if unset else ""
