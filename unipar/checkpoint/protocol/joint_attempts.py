"""Attempts of all ranks at once: all learn what came of them, so that they go on or fail together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from unipar.distributed.meeting.text_rounds import Decide
from unipar.errors import CheckpointError, UniparError
from unipar.utils.text import count_of


def attempt_together(
    decide: Decide,
    attempt: Callable[[], Any],
    describe: Callable[[str, Mapping[str, Any]], str],
    more: Callable[[], Mapping[str, Any]] = dict,
) -> list[Any]:
    """Return on rank 0 what an attempt returned on each rank, on the others what it returned on rank 0, alone.

    If it failed on any, raise the same CheckpointError on all. `describe` makes the error's sentence, of what failed on
    which rank and of what `more` returned there.
    """
    error: BaseException | None = None
    message: dict[str, Any] = {}
    try:
        message["result"] = attempt()
    except BaseException as e:  # the others wait, whatever happened here
        error = e
        message = {"error": describe_failure(e), **more()}
    results: list[Any] = []

    def judge(texts: list[str]) -> str:
        answers: list[dict[str, Any]] = [json.loads(text) for text in texts]
        failed = [rank for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            first = answers[failed[0]]
            others = f" (and {count_of(len(failed) - 1, 'more rank')})" if len(failed) > 1 else ""
            sentence = describe(f"rank {failed[0]}{others}: {first['error']}", first)
            return json.dumps({"error": sentence})
        results.extend(answer["result"] for answer in answers)
        return json.dumps({"result": results[0]})

    verdict: dict[str, Any] = json.loads(decide(json.dumps(message), judge))
    if error is not None and not isinstance(error, Exception):
        raise error
    if "error" in verdict:
        raise CheckpointError(verdict["error"]) from error
    return results or [verdict["result"]]


def describe_failure(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    if isinstance(error, UniparError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
