"""Single keys changed in a config's text, whose comments stay where they are."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.config.yaml_edit import CannotEdit, change_keys

TEXT = """# a run
backend: native        # who
parallel:              # what is split
  # over all
  data: auto           # ranks
batch: {total: 8, }    # samples
model:
train: {steps: 3}
"""


@pytest.mark.parametrize(
    ("changes", "old", "new"),
    [
        ({"backend": "deepspeed"}, "backend: native        # who", "backend: deepspeed     # who"),
        ({"parallel.data": 1024}, "data: auto           #", "data: 1024           #"),
        ({"parallel.shard": "parameters"}, "  # over all\n  data", "  # over all\n  shard: parameters\n  data"),
        ({"batch.micro": 2}, "{total: 8, }", "{total: 8, micro: 2, }"),
        ({"model.compile": True}, "model:\n", "model: {compile: true}\n"),
        ({"options.deepspeed.buckets": "library"}, "{steps: 3}\n",
         "{steps: 3}\noptions: {deepspeed: {buckets: library}}\n"),
        ({"batch.total": 16, "batch.micro": None}, "{total: 8, }", "{total: 16, micro: null, }"),
    ],
)  # fmt: skip
def test_changes(changes: dict[str, Any], old: str, new: str) -> None:
    """Of values, in blocks and in braces; keys and sections that are not there are added."""
    assert change_keys(TEXT, changes) == TEXT.replace(old, new)


def test_texts_without_an_end() -> None:
    """A last line without its newline, and no text at all."""
    assert change_keys("seed: 1", {"backend": "native"}) == "seed: 1\nbackend: native\n"
    assert change_keys("# nothing\n", {"batch.total": 8}) == "# nothing\nbatch: {total: 8}\n"
    assert change_keys("batch: {}\n", {"batch.total": 8}) == "batch: {total: 8}\n"


def test_what_is_no_mapping() -> None:
    """A value that is no mapping is told by its key."""
    with pytest.raises(CannotEdit) as caught:
        change_keys("batch: [1]\n", {"batch.total": 8})
    assert str(caught.value) == "batch.total"
