"""Which process plays which test files, and in which order, when pytest-xdist plays them in several.

A file's tests stay together, for the sake of what they share. So do files that share what takes seconds: a fork server
of workers whose memory is counted or which have an emulated device, or the versions of all libraries.
"""

from __future__ import annotations

from typing_extensions import override
from xdist.scheduler.loadfile import LoadFileScheduling

COUNTED = (
    "tests/comparison/test_compare.py",
    "tests/comparison/test_failed_strategies.py",
    "tests/comparison/test_store.py",
    "tests/launcher/micro_batch/test_trials.py",
    "tests/memory/test_collectives.py",
    "tests/memory/test_step_log.py",
    "tests/memory/test_watcher.py",
    "tests/training/test_out_of_memory.py",
)
PROBED = ("tests/cli/test_backends.py", "tests/cli/test_doctor.py")
TOGETHER = (COUNTED, PROBED)
EMULATED = "tests/emulated/"
"""Folder whose files stay together."""

FIRST = (
    "tests/conformance/test_conformance.py",
    *COUNTED,
    "tests/launcher/test_machines.py",
    EMULATED,
    "tests/launcher/test_foreign_launchers.py",
    "tests/verification/test_verify_tasks.py",
    "tests/verification/test_mesh_faults.py",
    "tests/verification/test_verify.py",
    "tests/observing/test_planted_faults.py",
    "tests/launcher/test_launch.py",
    "tests/launcher/test_notebook.py",
    "tests/conversion/test_export.py",
    "tests/engines/test_holdings.py",
    *PROBED,
    "tests/verification/test_verify_axes.py",
    "tests/training/test_hand_loops.py",
    "tests/verification/test_verify_resume.py",
    "tests/verification/test_verify_transformers.py",
    "tests/conversion/test_import_checkpoint.py",
    "tests/utils/test_malloc.py",
    "tests/checkpoint/exporting/test_transformers.py",
    "tests/launcher/test_checkpoints_elsewhere.py",
)
"""Files, and a folder, that take longest: were they played last, one process would wait for the other."""


class ByFile(LoadFileScheduling):
    """Plays a file's tests in one process; files in the order in which they were collected."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith(EMULATED):
            return EMULATED
        return next((files[0] for files in TOGETHER if file in files), file)


def place(nodeid: str) -> int:
    """Return the place of a test in the order; tests of one place keep theirs."""
    file = nodeid.partition("::")[0]
    file = EMULATED if file.startswith(EMULATED) else file
    return FIRST.index(file) if file in FIRST else len(FIRST)
