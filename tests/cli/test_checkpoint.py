"""`unipar checkpoint`: its commands, what they print and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.checkpoints import save_two_steps
from unipar.cli.commands.checkpoint.group import CHECKPOINT_COMMANDS
from unipar.utils.address import parse_address


def test_help_teaches_by_example(unipar: Any) -> None:
    """Every command has examples that begin with its own name."""
    told = unipar("checkpoint", "--help").out
    for name in CHECKPOINT_COMMANDS:
        assert f"unipar checkpoint {name}" in told
        assert f"unipar checkpoint {name} " in unipar("checkpoint", name, "--help").out


def test_list_and_inspect(unipar: Any, tmp_path: Path) -> None:
    """Tables, and the same as JSON; a folder means its newest checkpoint."""
    one, two = save_two_steps(tmp_path)
    listed = unipar("checkpoint", "list", str(tmp_path))
    assert [line.split()[0] for line in listed.out.splitlines()] == ["step", "2", "1"]
    data = json.loads(unipar("checkpoint", "list", str(tmp_path), "--json").out)
    assert [entry["path"] for entry in data] == [str(two), str(one)]
    assert unipar("checkpoint", "inspect", str(tmp_path)).out.startswith(
        f"{two}\nstep 2\ndata: epoch ?, next sample ?, unknown length\n"
    )
    inspected = json.loads(unipar("checkpoint", "inspect", str(one), "--only", "net.bias", "--json").out)
    assert [t["name"] for t in inspected["tensors"]] == ["net.bias"]


def test_verify_exits_1_where_one_is_broken(unipar: Any, tmp_path: Path) -> None:
    """All of a folder are checked; a flipped byte in a tensor is found, which `list` does not read."""
    one, two = save_two_steps(tmp_path)
    told = unipar("checkpoint", "verify", str(tmp_path))
    assert told.code == 0
    assert told.out == "".join(
        f"whole: {path}: 6 tensors, {size} B in 3 files\n" for path, size in ((two, 987), (one, 986))
    )
    file = one / "shards/rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "broken" not in unipar("checkpoint", "list", str(tmp_path)).out
    told = unipar("checkpoint", "verify", str(tmp_path))
    assert told.code == 1
    assert told.err == f"broken: {file}: its hash is not the one in manifest.json; its bytes changed\n"
    assert told.out.startswith(f"whole: {two}")


def test_diff_exits_1_where_tensors_differ(unipar: Any, tmp_path: Path) -> None:
    """A checkpoint is equal to itself, and another step is not."""
    one, two = save_two_steps(tmp_path)
    assert unipar("checkpoint", "diff", str(one), str(one)).code == 0
    told = unipar("checkpoint", "diff", str(one), str(two))
    assert told.code == 1
    assert "net.weight  weight" in told.out
    data = json.loads(unipar("checkpoint", "diff", str(one), str(two), "--json").out)
    assert {t["largest"] for t in data["tensors"]} == {1.0}


def test_addresses(unipar: Any, tmp_path: Path) -> None:
    """Each command takes one where it takes a path; of a place with several runs, one is to be named."""
    one, two = save_two_steps(parse_address(f"file://{tmp_path}/exp/a-0123abcd"))
    listed = unipar("checkpoint", "list", str(one.parent))
    assert [line.split()[0] for line in listed.out.splitlines()] == ["step", "2", "1"]
    assert unipar("checkpoint", "inspect", str(one.parent)).out.startswith(f"{two}\nstep 2\n")
    assert unipar("checkpoint", "verify", str(one.parent)).out.splitlines() == [
        f"whole: {two}: 6 tensors, 987 B in 3 files",
        f"whole: {one}: 6 tensors, 986 B in 3 files",
    ]
    assert unipar("checkpoint", "diff", str(one), str(two)).code == 1
    assert unipar("checkpoint", "export", str(two), "-o", str(tmp_path / "x.safetensors")).code == 0
    assert (tmp_path / "x.safetensors").stat().st_size > 100
    told = unipar("checkpoint", "list", f"file://{tmp_path}/exp")
    assert told.code == 1
    assert told.err == f"unipar: file://{tmp_path}/exp has checkpoints of several runs; name one: {one.parent}\n"
    told = unipar("checkpoint", "list", f"file://{tmp_path}/nothing")
    assert told.err == (
        f"unipar: file://{tmp_path}/nothing has no checkpoints: there is no folder such as step-00000500 in it\n"
    )
    told = unipar("checkpoint", "list", "sftp://me:hunter2@host/path")
    assert told.code == 2
    assert "sftp://***@host/path holds a password" in told.err
    assert "hunter2" not in told.err


def test_a_run_that_saves_elsewhere(unipar: Any, tmp_path: Path) -> None:
    """Its run folder leads to its checkpoints, and to no other run's beside them."""
    save_two_steps(tmp_path / "shared" / "other-89abcdef")
    save_two_steps(tmp_path / "shared" / "mine-0123abcd")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"checkpoint": {"to": str(tmp_path / "shared")}}), "utf-8")
    (run / "launch.json").write_text(json.dumps({"checkpoints": "mine-0123abcd"}), "utf-8")
    data = json.loads(unipar("checkpoint", "list", str(run), "--json").out)
    assert {Path(entry["path"]).parent.name for entry in data} == {"mine-0123abcd"}
