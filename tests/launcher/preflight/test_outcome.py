"""The table of an examination: remedies, and the line that ends it."""

from __future__ import annotations

from unipar.distributed.machine_checks import MachineCheck
from unipar.launcher.preflight.outcome import Examination


def test_a_remedy_that_several_lines_share_is_said_once() -> None:
    """Below the last of them."""
    closed = (MachineCheck("ports", "fail", f"{n} is closed", "open it") for n in (1, 2))
    outcome = Examination("srun", ("a", "b"), (*closed, MachineCheck("CPU", "ok", "CPU")))
    assert outcome.table() == (
        "2 machines, started by srun: a, b\n"
        "      what      found\n"
        "fail  ports     1 is closed\n"
        "fail  ports     2 is closed\n"
        "                -> open it\n"
        "ok    the rest  CPU\n"
        "not ready to run: 2 failures"
    )
    assert not outcome.ok


def test_warnings_do_not_fail() -> None:
    """The last line says so."""
    outcome = Examination("srun", ("a", "b"), (MachineCheck("clock", "warn", "b is behind", "set it"),))
    assert outcome.ok
    assert outcome.table().splitlines()[-1] == "ready to run, with 1 warning"
