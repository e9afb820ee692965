"""Attempts of all ranks at once: all learn what came of each, so that they go on or fail together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unipar.errors import CheckpointError, UniparError
from unipar.utils.text import count_of

Exchange = Callable[[bytes], Sequence[bytes]]
"""Collective of the caller: gives this rank's message to all ranks, and returns those of all, by rank."""


def attempt_together(
    exchange: Exchange,
    attempt: Callable[[], Any],
    describe: Callable[[str, Mapping[str, Any]], str],
    more: Callable[[], Mapping[str, Any]] = dict,
) -> list[Any]:
    """Return what an attempt returned on each rank; if it failed on any, raise the same CheckpointError on all.

    `describe` makes the error's sentence, of what failed on which rank and of what `more` returned there.
    """
    error: BaseException | None = None
    message: dict[str, Any] = {}
    try:
        message["result"] = attempt()
    except BaseException as e:  # the others wait, whatever happened here
        error = e
        message = {"error": describe_failure(e), **more()}
    answers: list[dict[str, Any]] = [json.loads(text) for text in exchange(json.dumps(message).encode("utf-8"))]
    if error is not None and not isinstance(error, Exception):
        raise error
    failed = [rank for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        first = answers[failed[0]]
        others = f" (and {count_of(len(failed) - 1, 'more rank')})" if len(failed) > 1 else ""
        raise CheckpointError(describe(f"rank {failed[0]}{others}: {first['error']}", first)) from error
    return [answer["result"] for answer in answers]


def describe_failure(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    if isinstance(error, UniparError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
