"""Runs that save to an object store over HTTP, and to a folder that several runs share."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.object_store import ObjectStore, object_store
from tests.support.run_logs import rows_of, step_losses
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.checkpoint.storage.remote import RemoteFolder
from unipar.utils.address import Address, parse_address

pytestmark = pytest.mark.forked

SGD = {"optimizer": {"name": "sgd", "lr": 0.01}}

SCRIPT = """
import json, sys
import unipar
from tests.support.tiny import CONFIG, Tiny

if __name__ == "__main__":
    config = {**CONFIG, "log": {"every": 1}, "checkpoint": {"every": 4, "keep": 2}, **json.loads(sys.argv[1])}
    try:
        unipar.launch(config, task=Tiny)
    except unipar.UniparError as e:
        print(e)
        raise SystemExit(e.code)
"""


@pytest.fixture(scope="module")
def store() -> Generator[ObjectStore]:
    with object_store() as made:
        yield made


def run(forks: Forks, folder: Path, config: dict[str, Any], code: int = 0) -> str:
    """Run the script with these sections to its end; return what it printed."""
    (folder / "script.py").write_text(SCRIPT, "utf-8")
    environment = {**PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "1"}
    done = forks.python(["script.py", json.dumps(config)], folder, environment)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def own_folder(run: Path) -> str:
    return json.loads((run / "launch.json").read_bytes())["checkpoints"]


def download(place: Address, to: Path) -> None:
    files = RemoteFolder(place)
    for name, size in files.sizes().items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(files.read(name, 0, size))


def test_saved_to_s3_and_continued_by_another_strategy(forks: Forks, store: ObjectStore, tmp_path: Path) -> None:
    """Two ranks of DDP save over HTTP, two of DeepSpeed's ZeRO-3 go on: with the losses that they have from a disk.

    No file of the run holds the store's key.
    """
    optimizer = {"name": "adamw", "lr": 0.01}
    first: dict[str, Any] = {"train": {"steps": 8, "optimizer": optimizer}, "out": "s3"}
    first["checkpoint"] = {"every": 4, "keep": 2, "to": f"{store.address}/exp"}
    run(forks, tmp_path, first)
    place = parse_address(f"{store.address}/exp/{own_folder(tmp_path / 's3')}")
    assert [found.step for found in find_checkpoints(place)] == [8, 4]
    download(place / "step-00000008", tmp_path / "copy")
    verify_checkpoint(tmp_path / "copy")
    zero = {"backend": "deepspeed", "parallel": {"data": 2, "shard": "parameters"}}
    then: dict[str, Any] = {**first, **zero, "train": {"steps": 12, "optimizer": optimizer}}
    run(forks, tmp_path, {**then, "resume": "auto"})
    run(forks, tmp_path, {**then, "out": "disk", "checkpoint": None, "resume": str(tmp_path / "copy")})
    assert [step for step, _ in step_losses(tmp_path / "s3")] == list(range(1, 13))
    assert step_losses(tmp_path / "s3")[8:] == step_losses(tmp_path / "disk")
    assert [found.step for found in find_checkpoints(place)] == [12, 8]
    kept = [path.read_bytes() for path in (tmp_path / "s3").rglob("*") if path.is_file()]
    kept += [RemoteFolder(place).read(name, 0, size) for name, size in RemoteFolder(place).sizes().items()]
    assert len(kept) > 12
    assert not any(store.environment["AWS_SECRET_ACCESS_KEY"].encode() in data for data in kept)


def test_a_folder_that_several_runs_share(forks: Forks, tmp_path: Path) -> None:
    """A run takes its own checkpoints alone, deletes its own alone, and goes on in its own folder."""
    shared = {"checkpoint": {"every": 4, "keep": 1, "to": str(tmp_path / "shared")}, "resume": "auto"}
    for name in ("one", "two"):
        run(forks, tmp_path, {**shared, "out": name, "train": {**SGD, "steps": 8}})
        assert len(step_losses(tmp_path / name)) == 8  # nothing was taken from the other
    owned = [own_folder(tmp_path / name) for name in ("one", "two")]
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == sorted(owned)
    assert owned[0].startswith("one-")
    run(forks, tmp_path, {**shared, "out": "one", "train": {**SGD, "steps": 12}})
    assert own_folder(tmp_path / "one") == owned[0]
    for name, step in zip(owned, (12, 8), strict=True):
        assert [found.step for found in find_checkpoints(tmp_path / "shared" / name)] == [step]


def test_a_store_that_fails(forks: Forks, store: ObjectStore, tmp_path: Path) -> None:
    """A bucket that is not there: one sentence, before step 1; with on_error: warn training goes on, and is told so."""
    keeps = {"every": 4, "to": "s3://nobucket/exp"}
    said = run(forks, tmp_path, {"out": "stop", "checkpoint": keeps}, code=1)
    assert "s3://nobucket/exp/stop-" in said
    assert said.endswith("cannot be written (The specified bucket does not exist)\n")
    assert step_losses(tmp_path / "stop") == []
    run(forks, tmp_path, {"out": "warn", "checkpoint": {**keeps, "on_error": "warn", "async": False}})
    assert [step for step, _ in step_losses(tmp_path / "warn")] == list(range(1, 13))
    failed = rows_of(tmp_path / "warn", "checkpoint failed")
    assert [row["step"] for row in failed] == [0, 4, 8, 12]


APART = """
import ctypes, os
import torch
import unipar
from tests.support.tiny import CONFIG, Tiny

class Apart(Tiny):
    def model(self):
        if torch.distributed.get_rank() == 1:  # as on another machine, another disk is at the same path
            libc = ctypes.CDLL(None, use_errno=True)
            private = 0x4000 | 0x40000
            done = libc.unshare(0x20000) or libc.mount(b"none", b"/", None, private, None)
            if done or libc.mount(b"tmpfs", os.fsencode(os.environ["APART"]), b"tmpfs", 0, None):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return super().model()

if __name__ == "__main__":
    try:
        unipar.launch({**CONFIG, "log": {"every": 1}, "checkpoint": {"to": os.environ["APART"]}}, task=Apart)
    except unipar.UniparError as e:
        print(e)
        raise SystemExit(e.code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts another disk for one rank: needs root")
def test_a_folder_that_is_another_on_each_machine(forks: Forks, tmp_path: Path) -> None:
    """Refused before step 1, in a sentence with the way out."""
    (tmp_path / "to").mkdir()
    (tmp_path / "script.py").write_text(APART, "utf-8")
    environment = {**PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "1", "APART": str(tmp_path / "to")}
    done = forks.python(["script.py"], tmp_path, environment)
    if "Operation not permitted" in done.stdout + done.stderr:
        pytest.skip("may not mount a disk here")
    assert done.returncode == 1, done.stderr
    host = socket.gethostname()
    assert done.stdout.endswith(
        f"rank 1: it is on {host} as well, and does not see there what rank 0 wrote on {host}: name a folder in "
        "checkpoint.to that all ranks share, or an address such as s3://bucket/path\n"
    )
    assert step_losses(tmp_path / "runs/run") == []
