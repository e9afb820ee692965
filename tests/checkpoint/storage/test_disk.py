"""Real file systems that fail, and the order of system calls that a power failure needs."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.checkpoints import save_on_ranks, save_two_steps
from tests.support.programs import needs_programs, reason_no_programs
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.backend import Region
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.checkpoint.storage.disk import Disk
from unipar.errors import CheckpointError

UNPUBLISHED = "it is not published; those of other steps are as they were"
ENVIRONMENT = {**os.environ, **PYTHONPATH_VARIABLE}


@contextmanager
def mounted(folder: Path, size: str) -> Generator[None]:
    """Mount a tmpfs of this size, or skip with the reason why that cannot be done here."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "unipar-test", str(folder)]
    if why := reason_no_programs("mount"):
        pytest.skip(why)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def big(rank: int, step: int) -> list[PieceToSave]:
    """Return a quarter of a megabyte for each rank."""
    size = 2**18
    return [PieceToSave("w", "weight", "U8", (2 * size,), Region(size * rank, size), bytes(size))]


def sentence_of_all(outcomes: list[object]) -> str:
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * len(outcomes)
    (sentence,) = {str(outcome) for outcome in outcomes}
    return sentence


def test_a_full_disk(tmp_path: Path) -> None:
    """Refused beforehand; where it fills up meanwhile, all ranks say so, and what was there stays."""

    class Hopeful(Disk):
        @override
        def free_bytes(self, path: Path) -> int:
            return 2**40

    with mounted(tmp_path / "small", "540k"):
        folder = tmp_path / "small" / "run"
        save_two_steps(folder)
        said = sentence_of_all([*save_on_ranks(folder, 3, pieces=big)])
        assert re.fullmatch(
            rf"checkpoint of step 3 in {folder}: rank 0: it needs 512 KiB and \d+ KiB are free: free some space, keep "
            rf"fewer checkpoints, or save elsewhere; {UNPUBLISHED}",
            said,
        )
        said = sentence_of_all([*save_on_ranks(folder, 3, pieces=big, disks=(Hopeful(), Hopeful()))])
        assert re.fullmatch(
            rf"checkpoint of step 3 in {folder}: rank [01](| \(and 1 more rank\)): (shards/rank-0000[01].safetensors|"
            rf"state.json): No space left on device; {UNPUBLISHED}",
            said,
        )
        assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]
        for found in find_checkpoints(folder):
            verify_checkpoint(found.path)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """Said on all ranks, with the folder's name; what is there can be read."""
    with mounted(tmp_path / "small", "600k"):
        folder = tmp_path / "small" / "run"
        save_two_steps(folder)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True)
        said = sentence_of_all([*save_on_ranks(folder, 3)])
        assert re.fullmatch(
            rf"checkpoint of step 3 in {folder}: rank 0: {folder}/\.tmp-step-00000003-[0-9a-f]{{8}}: "
            rf"Read-only file system; {UNPUBLISHED}",
            said,
        )
        assert verify_checkpoint(folder / "step-00000002").manifest.step == 2


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, set while the save runs: an error on all ranks instead of a signal."""
    save_two_steps(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        outcomes = save_on_ranks(tmp_path, 3, pieces=big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sentence_of_all([*outcomes]) == (
        f"checkpoint of step 3 in {tmp_path}: rank 0 (and 1 more rank): shards/rank-00000.safetensors: "
        f"File too large; {UNPUBLISHED}"
    )
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    """A file that stands in the way is named."""
    (tmp_path / "run").touch()
    said = sentence_of_all([*save_on_ranks(tmp_path / "run", 3)])
    assert said == (f"checkpoint of step 3 in {tmp_path}/run: rank 0: {tmp_path}/run: File exists; {UNPUBLISHED}")


def test_a_folder_that_others_wrote_into(tmp_path: Path) -> None:
    """A symlink in place of a checkpoint of this step is replaced, and what it leads to is left alone."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000003").symlink_to(outside)
    for outcome in save_on_ranks(tmp_path / "run", 3):
        assert not isinstance(outcome, BaseException)
    verify_checkpoint(tmp_path / "run" / "step-00000003")
    assert (outside / "precious").read_text() == "x"


TRACED = """
import sys
from pathlib import Path
from tests.support.checkpoints import pieces_of_rank
from unipar.checkpoint.protocol.save_checkpoint import save_checkpoint
from unipar.checkpoint.protocol.retention import Retention
for step in (1, 2):
    save_checkpoint(Path(sys.argv[1]), step, pieces_of_rank(0, step, world=1), {}, retention=Retention(keep=1))
"""


@needs_programs("strace")
def test_the_order_of_system_calls(tmp_path: Path) -> None:
    """Each file is flushed after its last write, its folders after that, then the rename, then its parent's entry.

    Only after that is the old checkpoint moved away.
    """
    log, folder = tmp_path / "log", tmp_path / "run"
    wanted = "trace=openat,write,fsync,rename,renameat,renameat2,mkdir,mkdirat,chmod,fchmodat,close,unlink,unlinkat"
    command = ["strace", "-f", "-y", "-e", wanted, "-o", str(log), sys.executable, "-c", TRACED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    if "ptrace" in done.stderr:
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    calls = second_save(log.read_text("utf-8"), folder)
    files = ["shards/rank-00000.safetensors", "state.json", "manifest.json", "manifest.sha256"]
    expected = [step for name in files for step in (f"write {name}", f"fsync {name}")]
    expected += ["fsync shards", "fsync .", "rename to step-00000002", "fsync the parent", "rename step-00000001 away"]
    assert calls == expected


def second_save(log: str, folder: Path) -> list[str]:
    """Return writes, flushes and renames of the second save, with names below its temporary folder."""
    temporary = re.search(r"\.tmp-step-00000002-[0-9a-f]+", log)
    assert temporary
    inside = re.escape(f"{folder}/{temporary[0]}")
    patterns = (
        (rf"write\(\d+<{inside}/([^>]+)>", r"write \1"),
        (rf"fsync\(\d+<{inside}/([^>]+)>", r"fsync \1"),
        (rf"fsync\(\d+<{inside}>", r"fsync ."),
        (rf'rename\w*\(.*"{inside}", .*"{re.escape(str(folder))}/(step-\d+)"', r"rename to \1"),
        (rf"fsync\(\d+<{re.escape(str(folder))}>", r"fsync the parent"),
        (rf'rename\w*\(.*"{re.escape(str(folder))}/(step-\d+)", .*/\.trash-', r"rename \1 away"),
    )
    found: list[str] = []
    for line in log[temporary.start() :].splitlines():
        for pattern, text in patterns:
            if match := re.search(pattern, line):
                assert re.search(r"= \d+", line), line
                step = match.expand(text)
                if not found or found[-1] != step:  # several writes of one file are one
                    found.append(step)
    return found
