"""Checks before a tensor is read: their sentences, falling back past broken checkpoints, and no code from data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.support.checkpoint_copies import PAYLOAD, Mutated
from tests.support.checkpoints import pieces_of_rank, save_two_steps
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.backend import Region
from unipar.checkpoint.format.shard_file import RegularFile
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave, save_checkpoint
from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint, verify_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.errors import CheckpointError, UniparError, rebuild

SHARD = "shards/rank-00001.safetensors"
Change = Callable[[Mutated], object]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    return str(caught.value)


def flip(m: Mutated) -> None:
    data = bytearray(m.read(SHARD))
    data[-1] ^= 1
    m.write(SHARD, bytes(data))


def reseal(change: Callable[[dict[str, object]], object]) -> Callable[[Mutated], None]:
    def mutate(m: Mutated) -> None:
        manifest = m.manifest()
        change(manifest)
        m.seal(manifest)

    return mutate


def swap_dtype(m: Mutated) -> None:
    m.seal_bytes(m.read("manifest.json").replace(b'"BF16"', b'"F16"'))


def move_piece(m: Mutated, start: int) -> None:
    """Let a piece begin elsewhere; its shard stays as the manifest says."""
    m.seal_bytes(
        m.read("manifest.json").replace(b'"exp_avg:net.weight:12", 12,', b'"exp_avg:net.weight:12", %d,' % start)
    )


def link_shard(m: Mutated) -> None:
    (m.path / SHARD).rename(m.path.parent / "outside")
    (m.path / SHARD).symlink_to(m.path.parent / "outside")


def make_pipe(m: Mutated) -> None:
    (m.path / SHARD).unlink()
    os.mkfifo(m.path / SHARD)


def link_folder(m: Mutated) -> None:
    (m.path / "shards").rename(m.path.parent / "outside-folder")
    (m.path / "shards").symlink_to(m.path.parent / "outside-folder")


DAMAGES: list[tuple[Change, str]] = [
    (flip, "{path}/shards/rank-00001.safetensors: its hash is not the one in manifest.json; its bytes changed"),
    (
        lambda m: m.write(SHARD, m.read(SHARD)[:-3]),
        "{path}/shards/rank-00001.safetensors: 383 bytes; manifest.json says 386",
    ),
    (
        lambda m: (m.path / SHARD).unlink(),
        "{path}/shards/rank-00001.safetensors: missing, though manifest.json lists it",
    ),
    (
        lambda m: m.write(SHARD, (m.other / SHARD).read_bytes()),
        "{path}/shards/rank-00001.safetensors: its hash is not the one in manifest.json; its bytes changed",
    ),
    (
        lambda m: m.write("shards/rank-00002.safetensors", m.read(SHARD)),
        "{path}/shards/rank-00002.safetensors: not listed in manifest.json; a checkpoint holds no other files",
    ),
    (link_shard, "{path}/shards/rank-00001.safetensors: cannot be opened (Too many levels of symbolic links)"),
    (link_folder, "{path}/shards: a symlink; a checkpoint holds none"),
    (
        lambda m: os.link(m.path / SHARD, m.path.parent / "second"),
        "{path}/shards/rank-00001.safetensors: has 2 hard links, so that it changes when another file does; copy "
        "the checkpoint instead",
    ),
    (make_pipe, "{path}/shards/rank-00001.safetensors: not a regular file"),
    (
        lambda m: m.write("manifest.json", m.read("manifest.json").replace(b'"step": 2', b'"step": 3')),
        "{path}/manifest.json: its SHA-256 is not the one in manifest.sha256; one of them changed",
    ),
    (
        reseal(lambda manifest: manifest.update(format=3)),
        "{path}/manifest.json: written in format 3, and this unipar reads formats up to 2; install the version of "
        "unipar that wrote it, or a newer one",
    ),
    (
        lambda m: m.seal_bytes(b'{"weight_map": {}}'),
        "{path}/manifest.json: no format version; this is not a file of a unipar checkpoint",
    ),
    (
        reseal(lambda manifest: manifest.update(step=5)),
        "{path}/manifest.json: of step 5, in the folder of step 2",
    ),
    (
        reseal(lambda manifest: manifest.update(step=-1)),
        "{path}/manifest.json: step is -1, not a whole number from 0 to 9223372036854775807",
    ),
    (
        reseal(lambda manifest: manifest.update(extra=5)),
        "{path}/manifest.json must have the keys format, step, files, tensors; 'extra' is extra or missing",
    ),
    (
        lambda m: m.seal_bytes(m.read("manifest.json").replace(SHARD.encode(), b"../outside.safetensors")),
        "{path}/manifest.json: files lists '../outside.safetensors', which is no name of a checkpoint's file",
    ),
    (
        swap_dtype,
        "{path}/shards/rank-00000.safetensors: 'weight:net.bias' is BF16 of shape [3]; manifest.json says F16 of "
        "shape [3]",
    ),
    (
        lambda m: move_piece(m, 11),
        "{path}/manifest.json: net.weight (exp_avg), of shape [4, 6]: 'exp_avg:net.weight:0' in "
        "shards/rank-00000.safetensors and 'exp_avg:net.weight:12' in shards/rank-00001.safetensors overlap",
    ),
    (
        lambda m: move_piece(m, 13),
        "{path}/manifest.json: net.weight (exp_avg), of shape [4, 6]: 'exp_avg:net.weight:12' in "
        "shards/rank-00001.safetensors holds elements up to 25 of 24",
    ),
    (
        lambda m: m.forge("state.json", b'{"format": 1, "step": 1}'),
        "{path}/state.json: of step 1; manifest.json is of step 2",
    ),
    (
        lambda m: m.write("state.json", m.read("state.json").replace(b"16", b"17")),
        "{path}/state.json: its hash is not the one in manifest.json; its bytes changed",
    ),
    (
        lambda m: m.forge("state.json", PAYLOAD),
        "{path}/state.json: not valid JSON (Expecting value: line 1 column 1 (char 0))",
    ),
    (lambda m: shutil.rmtree(m.path), "{path}: no checkpoint (No such file or directory)"),
]


@pytest.mark.parametrize(("mutate", "sentence"), DAMAGES, ids=range(len(DAMAGES)))
def test_what_is_amiss_is_said_with_the_name_of_the_file(tmp_path: Path, mutate: Change, sentence: str) -> None:
    """One sentence for each kind of damage."""
    old, path = save_two_steps(tmp_path)
    mutate(Mutated(path, old, Random(0)))
    assert refusal(path) == sentence.replace("{path}", str(path))


def test_a_checkpoint_that_calls_its_strategy_a_cell(tmp_path: Path) -> None:
    """Checkpoints did before 0.1.0; they are read as those of today."""
    old, path = save_two_steps(tmp_path)
    Mutated(path, old, Random(0)).forge("state.json", b'{"format": 1, "step": 2, "cell": "native/nothing"}')
    assert inspect_checkpoint(path).state == {"format": 1, "step": 2, "strategy": "native/nothing"}


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    """A file, a foreign folder, a symlink, and the folder around checkpoints, which names those in it."""
    save_two_steps(tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run" / "step-00000002")
    assert (
        refusal(tmp_path / "file") == f"{tmp_path}/file: not a folder; a checkpoint is a folder such as step-00000500"
    )
    assert refusal(tmp_path / "foreign") == (
        f"{tmp_path}/foreign: not a unipar checkpoint: there is no manifest.json in it"
    )
    assert refusal(tmp_path / "run") == (
        f"{tmp_path}/run: not a unipar checkpoint: there is no manifest.json in it; name one of the checkpoints in it: "
        "step-00000002, step-00000001"
    )
    assert refusal(tmp_path / "link") == (
        f"{tmp_path}/link: a symlink; name the folder itself, {tmp_path}/run/step-00000002"
    )


def test_a_renamed_or_copied_checkpoint_verifies(tmp_path: Path) -> None:
    """A person may keep one under any name."""
    _, new = save_two_steps(tmp_path)
    shutil.copytree(new, tmp_path / "the good one")
    assert verify_checkpoint(tmp_path / "the good one").manifest.step == 2


def test_checkpoints_are_found_newest_first(tmp_path: Path) -> None:
    """Broken ones among them, which say why; other names in the folder are nobody's business."""
    for step in (5, 10, 100_000_000, 7):
        save_checkpoint(tmp_path, step, pieces_of_rank(0, step, world=1), {})
    (tmp_path / ".tmp-step-00000200-abcd").mkdir()
    (tmp_path / "step-300").mkdir()
    assert [found.step for found in find_checkpoints(tmp_path)] == [100_000_000, 10, 7]
    (tmp_path / "step-100000000" / "state.json").unlink()
    shard = tmp_path / "step-00000010" / "shards" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x77")
    said: list[str] = []
    for found in find_checkpoints(tmp_path):
        try:
            said.append(f"{verify_checkpoint(found.path).manifest.step} is whole")
        except CheckpointError as e:
            said.append(str(e))
    assert said == [
        f"{tmp_path}/step-100000000/state.json: missing, though manifest.json lists it",
        f"{shard}: its hash is not the one in manifest.json; its bytes changed",
        "7 is whole",
    ]
    assert find_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_counts_every_byte_of_the_shards(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one thread or several; ranks that verify together hash each shard once."""
    monkeypatch.setattr(RegularFile, "chunk", 100)
    _, new = save_two_steps(tmp_path)
    sizes = [file.stat().st_size for file in (new / "shards").iterdir()]
    seen: list[tuple[int, int]] = []
    verify_checkpoint(new, threads=threads, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (sum(sizes), sum(sizes))
    assert sorted(seen) == seen
    totals: list[int] = []
    for rank in range(3):
        seen.clear()
        verify_checkpoint(
            new, threads=threads, share=(rank, 3), progress=lambda done, total: seen.append((done, total))
        )
        totals.append(seen[-1][0] if seen else 0)
    assert sorted(totals) == sorted([0, *sizes])


def test_a_flip_is_seen_by_the_rank_whose_share_it_is(tmp_path: Path) -> None:
    """By no other, and not without hashes: the ranks must agree."""
    old, new = save_two_steps(tmp_path)
    flip(Mutated(new, old, Random(0)))
    inspect_checkpoint(new)
    outcomes: list[bool] = []
    for rank in range(2):
        try:
            verify_checkpoint(new, share=(rank, 2))
            outcomes.append(True)
        except CheckpointError:
            outcomes.append(False)
    assert sorted(outcomes) == [False, True]


def test_a_shard_that_changed_since_is_refused(tmp_path: Path) -> None:
    """Between verifying and reading."""
    _, new = save_two_steps(tmp_path)
    checkpoint = verify_checkpoint(new)
    (new / SHARD).write_bytes(b"")
    with (
        SavedState(new, checkpoint.manifest) as state,
        pytest.raises(CheckpointError, match="0 bytes, too few for a header; it is truncated"),
    ):
        state.whole("net.weight", "weight")


def test_a_checkpoint_error_crosses_processes() -> None:
    """A rank's error has the same type in the parent."""
    error = rebuild("CheckpointError", "step 2 is broken")
    assert isinstance(error, CheckpointError)
    assert isinstance(error, UniparError)
    assert (str(error), error.code) == ("step 2 is broken", 1)


WATCHED = """
import json, sys
from pathlib import Path
from unipar.checkpoint.format.shard_file import ShardReader
from unipar.checkpoint.protocol.verifying import find_checkpoints, verify_checkpoint
from unipar.errors import CheckpointError
heavy = sorted({"torch", "numpy", "safetensors", "pickle"} & set(sys.modules))
events = set()
sys.addaudithook(lambda event, args: events.add(event))
passed = []
for found in find_checkpoints(Path(sys.argv[1])):
    try:
        whole = verify_checkpoint(found.path)
        break
    except CheckpointError as e:
        passed.append(str(e))
with ShardReader(whole.path, "shards/rank-00000.safetensors") as shard:
    shard.read_tensor_into("weight:net.bias", 0, bytearray(6))
bad = {event for event in events if event.split(".")[0] in
       ("import", "exec", "compile", "pickle", "marshal", "code", "subprocess", "socket", "ctypes", "webbrowser")
       or event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.rename", "os.remove", "os.mkdir")}
print(json.dumps([whole.manifest.step, len(passed), heavy, sorted(bad), "open" in events]))
"""


def test_no_code_comes_from_data(tmp_path: Path) -> None:
    """An audit hook sees no unpickling, import or exec while planted files are refused and a whole one is read."""
    old, new = save_two_steps(tmp_path)
    for step, name in ((3, "state.json"), (4, "shards/rank-00000.safetensors"), (5, "data.pkl"), (6, "manifest.json")):
        copy = tmp_path / f"step-{step:08d}"
        shutil.copytree(new, copy)
        if name == "data.pkl":
            (copy / name).write_bytes(PAYLOAD)
        elif name == "manifest.json":
            Mutated(copy, old, Random(0)).seal_bytes(PAYLOAD)
        else:
            Mutated(copy, old, Random(0)).forge(name, PAYLOAD)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, **PYTHONPATH_VARIABLE},
    )
    assert json.loads(done.stdout) == [2, 4, [], [], True]
    assert not list(tmp_path.rglob("payload-ran"))


def test_a_whole_tensor_of_many_ranks_takes_no_time_to_check(tmp_path: Path) -> None:
    """A matrix of a million rows whose two columns are two pieces: runs are not visited."""
    rows = 1_000_000
    pieces = [PieceToSave("w", "weight", "U8", (rows, 2), Region(i, 1, 2, rows), bytes(rows)) for i in range(2)]
    assert verify_checkpoint(save_checkpoint(tmp_path, 1, pieces, {}).path).manifest.bytes > 2 * rows
