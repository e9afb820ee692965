"""A run's folder: what is taken for one, and where none can be made."""

from __future__ import annotations

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, local

import pytest

from unipar.errors import ConfigError, OutExists
from unipar.run_folder import folder

CONFIG, LAUNCH = '{"batch": {}, "train": {}}', '{"task": {}}'


def test_overwriting_keeps_a_comparison(tmp_path: Path) -> None:
    """compare writes below the same folder: neither is in the other's way."""
    (tmp_path / "compare").mkdir()
    folder.check_run_folder(tmp_path, overwrite=False)
    with folder.create_run_folder(tmp_path, CONFIG, LAUNCH, overwrite=False):
        (tmp_path / "tensorboard").mkdir()
    with folder.create_run_folder(tmp_path, "{1}", LAUNCH, overwrite=True):
        pass
    assert sorted(os.listdir(tmp_path)) == ["compare", "config.json", "launch.json"]
    assert (tmp_path / "config.json").read_text("utf-8") == "{1}"


@pytest.mark.parametrize(
    ("config", "launch", "strange"),
    [
        (None, None, "no config.json in it"),
        ({"model_type": "gpt2"}, None, "its config.json is not a run's"),
        ([1], None, "its config.json is not a run's"),
        ({"batch": {}, "train": {}}, None, "no launch.json in it"),
        ({"batch": {}, "train": {}}, {"kernel": 1}, "its launch.json is not a run's"),
        ({"batch": {}, "train": {}}, "", "its launch.json is not a run's"),
    ],
)
def test_what_is_no_run_is_not_overwritten(tmp_path: Path, config: object, launch: object, strange: str) -> None:
    """A model's folder has a config.json too: both files must be a run's."""
    (tmp_path / "model.safetensors").touch()
    for name, held in (("config.json", config), ("launch.json", launch)):
        if held is not None:
            (tmp_path / name).write_text(json.dumps(held) if held else "", "utf-8")
    with pytest.raises(OutExists) as e, folder.create_run_folder(tmp_path, CONFIG, LAUNCH, overwrite=True):
        raise AssertionError
    assert str(e.value) == (
        f"out: {tmp_path} is not a run folder of unipar ({strange}), so it is not overwritten; "
        "name another folder, or remove it yourself"
    )
    assert (tmp_path / "model.safetensors").exists()


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    """A write that ends in the middle, here at a character that cannot be written, leaves the run as it was."""
    folder.write_run_files(tmp_path, CONFIG, LAUNCH)
    with pytest.raises(UnicodeEncodeError):
        folder.write_run_files(tmp_path, CONFIG + "\ud800", LAUNCH)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "launch.json"]
    assert folder.newest_run_folder(tmp_path, alone=True) == tmp_path


def test_a_loop_of_a_script_is_a_run_too(tmp_path: Path) -> None:
    """Its launch.json names the script instead of a task."""
    for _ in range(2):
        with folder.create_run_folder(tmp_path, CONFIG, '{"script": ["script", "x.py"]}', overwrite=True):
            pass
    assert sorted(os.listdir(tmp_path)) == ["config.json", "launch.json"]


def test_out_below_a_file(tmp_path: Path) -> None:
    """Seen before anything is made."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as e:
        folder.check_run_folder(tmp_path / "file/x/y", overwrite=False)
    assert str(e.value) == (
        f"out: {tmp_path}/file/x/y cannot be created: {tmp_path}/file is a file; "
        "name a folder that you can write to (out: ..., or --out DIR)"
    )


def test_out_that_is_a_broken_link(tmp_path: Path) -> None:
    """The link is there, and no folder."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutExists, match="link is a broken symbolic link; name another folder"):
        folder.check_run_folder(tmp_path / "link", overwrite=True)


def test_out_where_nobody_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest folder that is there is asked, and named; so is one that is there already."""
    asked: list[str] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(f"{path} {mode & os.W_OK}")
        return False

    monkeypatch.setattr(os, "access", access)  # root may write everywhere
    with pytest.raises(ConfigError) as e:
        folder.check_run_folder(tmp_path / "x/y", overwrite=False)
    assert str(e.value) == (
        f"out: {tmp_path}/x/y cannot be created: {tmp_path} is not writable; "
        "name a folder that you can write to (out: ..., or --out DIR)"
    )
    with pytest.raises(ConfigError, match=r" is not writable; name a folder that you can write to"):
        folder.check_run_folder(tmp_path, overwrite=False)
    assert asked == [f"{tmp_path} 2", f"{tmp_path} 2"]


def test_out_that_only_the_system_refuses() -> None:
    """/proc looks as if root could write there."""
    with pytest.raises(ConfigError) as e, folder.create_run_folder(Path("/proc/x/y"), CONFIG, LAUNCH, overwrite=False):
        raise AssertionError
    assert str(e.value).startswith("out: /proc/x/y cannot be written")
    assert str(e.value).endswith("; name a folder that you can write to (out: ..., or --out DIR)")


def test_the_first_name_that_is_free(tmp_path: Path) -> None:
    """A comparison is in nobody's way; a run, a file and what else is there are."""
    (tmp_path / "x/compare").mkdir(parents=True)
    assert folder.first_free_folder(tmp_path / "x") == tmp_path / "x"
    (tmp_path / "x/config.json").touch()
    (tmp_path / "x-2").touch()
    (tmp_path / "x-3").symlink_to(tmp_path / "nowhere")
    (tmp_path / "x-4").mkdir()
    (tmp_path / "x-4/notes.txt").touch()
    (tmp_path / "x-5").mkdir()
    (tmp_path / "x-max").mkdir()
    assert folder.first_free_folder(tmp_path / "x") == tmp_path / "x-5"
    assert {path.name for path in folder.existing_numbered_folders(tmp_path / "x")} == {"x", "x-4", "x-5"}
    assert folder.existing_numbered_folders(tmp_path / "no/x") == []


def _never_refuses(file: int, how: int) -> None:
    """Lock nothing."""


@pytest.mark.parametrize("locks", ["kept", "not shared"])
def test_claims_at_the_same_time(locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets a folder of its own, also on a file system that does not share locks between machines."""
    if locks == "not shared":
        monkeypatch.setattr(fcntl, "flock", _never_refuses)
    judged, claimed, first, check = Barrier(8), Barrier(8), local(), folder.check_run_folder

    def check_together(out: Path, *, overwrite: bool) -> None:
        check(out, overwrite=overwrite)
        if not hasattr(first, "done"):  # all have found the first name free before anybody takes it
            first.done = True
            judged.wait(20)

    monkeypatch.setattr(folder, "check_run_folder", check_together)

    def claim(_: int) -> Path:
        with folder.claim_run_folder(tmp_path / "runs/x") as out:
            claimed.wait(20)
            folder.write_run_files(out, CONFIG, LAUNCH)
            return out

    with ThreadPoolExecutor(8) as pool:
        claims = sorted(path.name for path in pool.map(claim, range(8)))
    assert claims == ["x", *(f"x-{n}" for n in range(2, 9))]
    assert sorted(os.listdir(tmp_path / "runs")) == claims


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """A folder is locked while its run lasts, and no longer; somebody who looks is in nobody's way."""
    with ExitStack() as stack:
        out = stack.enter_context(folder.claim_run_folder(tmp_path / "x"))
        assert folder.is_locked(out)
        assert folder.is_locked(out)
    assert not folder.is_locked(out)
    with folder.lock_folder(out):
        pass


def test_no_folder_can_be_claimed_below_a_file(tmp_path: Path) -> None:
    """The sentence is the one of a folder that was named; no number helps."""
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError) as e, folder.claim_run_folder(tmp_path / "runs/x"):
        raise AssertionError
    assert str(e.value) == (
        f"out: {tmp_path}/runs/x cannot be created: {tmp_path}/runs is a file; "
        "name a folder that you can write to (out: ..., or --out DIR)"
    )
