"""Submissions of the least task, and what a job system would be handed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.world import ROOT
from unipar.backend.checks import read_source
from unipar.jobs.submission import Submission, make_submission

TEXT = f"""
task: {{use: {ROOT}/tests/support/tiny.py:Tiny}}
device: cpu
batch: {{total: 8}}
train: {{steps: 12, optimizer: {{name: sgd, lr: 0.01}}}}
log: {{every: 5}}
"""


def write_config(folder: Path, more: str = "", name: str = "x.yaml") -> Path:
    """Write the config, with further sections, to a folder."""
    file = folder / name
    file.write_text(TEXT + more, encoding="utf-8")
    return file


def submission(
    file: Path, on: str, sets: Sequence[str] = (), command: str = "run", arguments: Sequence[str] = ()
) -> Submission:
    """The job for a config, checked; `sets` as --set has them."""
    return make_submission(read_source(file, sets), on, command, file, arguments)


def text_of(made: Submission) -> str:
    """The only file of a submission."""
    ((_, text),) = made.texts.items()
    return text
