"""What an examination looks at, and its table: remedies, and the line that ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.distributed.machine_checks import MachineCheck
from unipar.distributed.place import Place
from unipar.launcher.preflight.examination import judge_meeting_point
from unipar.launcher.preflight.network import neighbours
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


def test_neighbours() -> None:
    """Every other machine, and of many the next one and the one before, so that each pair is tried both ways."""
    assert [neighbours(index, 3) for index in range(3)] == [[1, 2], [0, 2], [0, 1]]
    assert [neighbours(index, 17) for index in (0, 1, 16)] == [[1, 16], [0, 2], [0, 15]]


@pytest.mark.parametrize(
    ("port", "hosted", "expected"),
    [
        (29400, False, [("ok", "port 29400 was free")]),
        (60000, False, [("warn", "port 60000 is one that the system gives to any connection (32768 to 60999)")]),
        (60000, True, []),
    ],
)
def test_the_port_of_the_meeting_point(
    port: int, hosted: bool, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the system may give away is free now, and perhaps not when the run starts; an agent keeps its own."""
    monkeypatch.setattr(Path, "read_text", lambda *_: "32768\t60999\n")  # pyright: ignore[reportUnknownLambdaType]
    address = ("10.0.0.1", port)
    place = Place(rank=0, size=2, local_rank=0, local_size=1, launcher="srun", address=address, hosted=hosted)
    assert [(check.status, check.finding) for check in judge_meeting_point(place)] == expected
