"""Weights that are not trained: saved once beside the checkpoints, by any world, and found out when they change."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

import unipar
from tests.support.running import Line, running
from tests.support.world import ROOT
from unipar.backend import Piece, Region
from unipar.backend.offered_strategies import config_in_strategy
from unipar.checkpoint.exporting.writing import ExportWish, export_checkpoint
from unipar.checkpoint.format.manifest import is_kept_beside
from unipar.checkpoint.frozen_weights import sums_of
from unipar.checkpoint.overview.checkpoint_contents import describe_checkpoint
from unipar.checkpoint.protocol.verifying import find_checkpoints, inspect_checkpoint, verify_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.config import Config, Strategy
from unipar.errors import CheckpointError
from unipar.results.trained_model import newest_whole_checkpoint
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.address import Location, parse_address

pytestmark = pytest.mark.forked


class Adapted(Line):
    """A frozen layer of 4,096 numbers between two small ones that are trained."""

    @override
    def model(self) -> Any:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 1))
        made[1].requires_grad_(requires_grad=False)
        return made


class Teacher(Adapted):
    """The frozen layer follows the first one, as in BYOL and DINO: by `.data`, so that no version counts it.

    A bias is frozen and stays as it is.
    """

    @override
    def model(self) -> Any:
        made = super().model()
        made[3].bias.requires_grad_(requires_grad=False)
        return made

    @override
    def train(self, run: Any) -> None:
        for local_batch in run.batches():
            run.step(local_batch)
            (module,) = (part.module for part in run.parts.values())
            module[1].weight.data.mul_(0.5).add_(module[0].weight.data, alpha=0.5)


def trained(folder: Path, task: Any = None, *, steps: int = 2, **checkpoint: Any) -> list[dict[str, Any]]:
    """Train, and return the rows of the run log on checkpoints."""
    folder.mkdir(exist_ok=True)
    resume = checkpoint.pop("resume", None)
    model = checkpoint.pop("model", {})
    train = {"steps": steps, "optimizer": {"name": "adamw", "lr": 1e-3}, "ema": {"decay": 0.5}}
    more = {"checkpoint": {"every": 1, "keep": 2, **checkpoint}, "batch": {"total": 5}}
    with running(task or Adapted(), folder, train=train, resume=resume, model=model, **more) as run:
        run.task.train(run)
    return [row for row in RunLog.read(run_log_path(folder, 0)) if row["event"] == "checkpoint"]


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))


def tensors(path: Location, kind: str = "weight") -> dict[str, Tensor]:
    contents = verify_checkpoint(path)
    with SavedState(path, contents.manifest) as saved:
        return {name: saved.whole(name, kind) for name, its in contents.manifest.tensors if its == kind}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_frozen_weights_are_saved_once(tmp_path: Path, asynchronous: bool) -> None:
    """16 KiB less in each checkpoint but the first, which hold all that those with copies hold."""
    copied = trained(tmp_path / "copy", frozen="copy", steps=3, **{"async": asynchronous})
    shared = trained(tmp_path / "reference", frozen="reference", steps=3, **{"async": asynchronous})
    folder = tmp_path / "reference" / "checkpoints"
    (frozen,) = beside(folder)
    assert [path.name for path in (folder / frozen).iterdir()] == ["rank-00000.safetensors"]
    less = [old["bytes"] - new["bytes"] for old, new in zip(copied, shared, strict=True)]
    assert all(64 * 64 * 4 < size < 64 * 64 * 4 + 500 for size in less[1:])
    assert -500 < less[0] < 0
    one, other = (tmp_path / name / "checkpoints" / "step-00000003" for name in ("copy", "reference"))
    for kind in ("weight", "buffer", "average", "exp_avg"):
        old, new = tensors(one, kind), tensors(other, kind)
        assert old.keys() == new.keys()
        assert all(torch.equal(t, new[name]) for name, t in old.items())
    assert "1.weight" not in tensors(other, "average")
    assert inspect_checkpoint(one).manifest.format == 1
    assert inspect_checkpoint(other).manifest.format == inspect_checkpoint(other).state["format"] == 2
    assert f"16 KiB in {frozen} beside the checkpoint: 1 frozen weight, shared with others" in describe_checkpoint(
        inspect_checkpoint(other)
    )


def test_where_weights_came_from_a_file_they_are_saved_once(tmp_path: Path) -> None:
    """Without a key: by reference if the config has model.weights, and as a copy if not."""
    save_file(Adapted().model().state_dict(), tmp_path / "base.safetensors")
    trained(tmp_path / "fresh")
    trained(tmp_path / "tuned", model={"weights": str(tmp_path / "base.safetensors")})
    assert beside(tmp_path / "fresh" / "checkpoints") == []
    assert len(beside(tmp_path / "tuned" / "checkpoints")) == 1


def test_a_run_that_goes_on_uses_the_file(tmp_path: Path) -> None:
    """In its folder, also if that was moved; and a run that begins with the checkpoint has a file of its own."""
    trained(tmp_path / "before", frozen="reference")
    shutil.move(tmp_path / "before", tmp_path / "run")
    names = beside(tmp_path / "run" / "checkpoints")
    rows = trained(tmp_path / "run", frozen="reference", steps=5, resume="auto")
    assert beside(tmp_path / "run" / "checkpoints") == names
    assert max(row["bytes"] for row in rows[1:]) < 12_000
    start = tmp_path / "run" / "checkpoints" / "step-00000005"
    trained(tmp_path / "next", frozen="reference", steps=6, resume=str(start))
    (other,) = beside(tmp_path / "next" / "checkpoints")
    assert other not in names
    mine, its = (tensors(path)["1.weight"] for path in (start, tmp_path / "next" / "checkpoints" / "step-00000006"))
    assert torch.equal(mine, its)


def test_the_file_stays_while_a_checkpoint_needs_it(tmp_path: Path) -> None:
    """Copies from here on: the file goes with the last checkpoint that names it; then again a file."""
    folder = tmp_path / "run" / "checkpoints"
    trained(tmp_path / "run", frozen="reference")
    names = beside(folder)
    trained(tmp_path / "run", frozen="copy", steps=3, resume="auto")
    assert (beside(folder), [found.step for found in find_checkpoints(folder)]) == (names, [3, 2])
    verify_checkpoint(folder / "step-00000002")
    trained(tmp_path / "run", frozen="copy", steps=4, resume="auto")
    assert (beside(folder), [found.step for found in find_checkpoints(folder)]) == ([], [4, 3])
    rows = trained(tmp_path / "run", frozen="reference", steps=5, resume="auto")
    assert rows[-1]["remarks"] == []
    assert len(beside(folder)) == 1
    verify_checkpoint(folder / "step-00000005")


def test_a_file_that_no_checkpoint_needs_is_deleted(tmp_path: Path) -> None:
    """One that a killed process left; not while a checkpoint cannot be read, because it may be its file."""
    trained(tmp_path / "run", frozen="reference")
    folder = tmp_path / "run" / "checkpoints"
    (mine,) = beside(folder)
    shutil.copytree(folder / mine, folder / "frozen-00000000")
    damaged = folder / "step-00000001" / "manifest.sha256"
    text = damaged.read_text()
    damaged.write_text(text.replace("manifest.json", "another"))
    trained(tmp_path / "run", frozen="reference", keep=9, steps=3, resume="auto")
    assert beside(folder) == sorted([mine, "frozen-00000000"])
    damaged.write_text(text)
    trained(tmp_path / "run", frozen="reference", keep=9, steps=4, resume="auto")
    assert beside(folder) == [mine]


def test_a_frozen_weight_that_changes_is_in_each_checkpoint(tmp_path: Path) -> None:
    """A teacher that follows its student is noticed in the second save, and no checkpoint has an old value."""
    rows = trained(tmp_path / "run", Teacher(), frozen="reference", steps=4, keep=9)
    assert [row["remarks"] for row in rows] == [
        [],
        ["1.weight: changed, though not trained; saved in each checkpoint from now on"],
        [],
        [],
    ]
    trained(tmp_path / "copy", Teacher(), frozen="copy", steps=4, keep=9)
    for step in (1, 2, 3, 4):
        mine, its = (tensors(tmp_path / n / "checkpoints" / f"step-{step:08d}") for n in ("run", "copy"))
        assert torch.equal(mine["1.weight"], its["1.weight"])
    (row,) = trained(tmp_path / "run", Teacher(), frozen="reference", steps=5, resume="auto", keep=9)[4:]
    assert row["remarks"] == []  # known from the checkpoint


def test_a_missing_or_changed_file_is_refused(tmp_path: Path) -> None:
    """Each sentence names the file and what to do; under `resume: auto` no checkpoint is left to go on from."""
    trained(tmp_path / "run", frozen="reference")
    folder = tmp_path / "run" / "checkpoints"
    (name,) = beside(folder)
    file, path = folder / name / "rank-00000.safetensors", folder / "step-00000002"
    verify_checkpoint(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    changed = (
        f"{file}: its hash is not the one in manifest.json; its bytes changed; all checkpoints that name {name} need "
        "it as it was: restore it from a copy"
    )
    assert refusal(path) == changed
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path / "run", frozen="reference", steps=3, resume="auto")
    assert str(caught.value) == (
        f"{folder} holds no complete checkpoint: {changed}; {changed}; start anew with `resume: never`"
    )
    file.write_bytes(whole[:-4])
    assert refusal(path) == (
        f"{file}: {len(whole) - 4:,} bytes; manifest.json says {len(whole):,}; all checkpoints that name {name} need "
        "it as it was: restore it from a copy"
    )
    shutil.copytree(path, tmp_path / "alone" / path.name)
    assert refusal(tmp_path / "alone" / path.name) == (
        f"{tmp_path}/alone/{name}/rank-00000.safetensors: missing, though {tmp_path}/alone/step-00000002/manifest.json "
        f"lists it: step-00000002 has the weights that are not trained in the folder {name} beside it; copy that "
        f"folder to {tmp_path}/alone from where the checkpoint was saved"
    )
    alone = verify_checkpoint(tmp_path / "alone" / path.name, beside=False)
    done = export_checkpoint(alone, tmp_path / "trained.safetensors", ExportWish(trainable=True))
    assert (done.tensors, done.averages) == (6, 6)
    file.write_bytes(whole)
    shutil.copytree(folder / name, tmp_path / "alone" / name)
    assert verify_checkpoint(tmp_path / "alone" / path.name).manifest.step == 2
    file.unlink()
    file.symlink_to(tmp_path / "alone" / name / file.name)
    assert refusal(path).startswith(f"{file}: cannot be opened (")


def test_at_an_address(tmp_path: Path) -> None:
    """The file is beside the checkpoints in the store, and a run goes on with it."""
    place = f"memory://{tmp_path.name}/frozen"
    first = trained(tmp_path / "run", frozen="reference", to=place)
    rows = trained(tmp_path / "run", frozen="reference", to=place, steps=4, resume="auto")
    assert [row["bytes"] for row in rows[1:]] == [pytest.approx(first[1]["bytes"], abs=50)] * 3
    newest = parse_address(place) / "step-00000004"
    trained(tmp_path / "copy", frozen="copy", steps=4)
    assert torch.equal(tensors(newest)["1.weight"], tensors(tmp_path / "copy/checkpoints/step-00000004")["1.weight"])
    (name,) = inspect_checkpoint(newest).manifest.folders_beside
    for step in (5, 6):
        trained(tmp_path / "run", frozen="copy", to=place, steps=step, resume="auto")
    assert verify_checkpoint(parse_address(place) / "step-00000005").manifest.folders_beside == set()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        SavedState(newest, inspect_checkpoint(parse_address(place) / "step-00000005").manifest)(
            "1.weight", "weight", Region(0, 4)
        )
    assert name.startswith("frozen-")


CHAIN = [
    *[("native/parameters", 2), ("deepspeed/parameters", 2), ("native/nothing+tensor2", 2), ("single", 1)],
    ("accelerate/parameters", 3),
]
WHOLE_CHAIN = [
    *[("native/nothing", 2), ("native/optimizer", 2), ("native/parameters", 4), ("native/nothing+tensor2", 4)],
    *[("native/nothing+pipeline2", 2), ("native/nothing+context2", 2), ("deepspeed/nothing", 2), ("single", 1)],
    *[("deepspeed/optimizer", 3), ("deepspeed/gradients", 2), ("deepspeed/parameters", 2), ("horovod/nothing", 2)],
    *[("accelerate/nothing", 2), ("accelerate/parameters", 2), ("accelerate/parameters+zero", 3)],
    *[("native/parameters+tensor2", 4), ("native/parameters+pipeline2", 4)],
]


@pytest.mark.parametrize("chain", [CHAIN, pytest.param(WHOLE_CHAIN, marks=pytest.mark.sweep)])
def test_each_strategy_goes_on_with_the_file_of_the_first(chain: Sequence[tuple[str, int]], tmp_path: Path) -> None:
    """One step in each, in one folder: the file stays the one of the first, whose parts are cut as it cut them."""
    run = tmp_path / "run"
    sizes = {"layers": 2, "width": 16, "heads": 2, "context": 8}
    before: dict[str, Tensor] = {}
    files: dict[str, bytes] = {}
    for step, (strategy, ranks) in enumerate(chain, 1):
        made = Config.model_validate(
            {
                "task": {"use": f"{ROOT}/tests/support/frozen_task.py:Tuned", "args": sizes},
                "device": "cpu",
                "parallel": {"data": ranks},
                "batch": {"total": 12},
                "train": {"steps": step, "optimizer": {"name": "adamw", "lr": 0.01}, "ema": {"decay": 0.9}},
                "checkpoint": {"frozen": "reference"},
                "out": str(run),
                "resume": "auto",
            }
        )
        unipar.launch(config_in_strategy(made, Strategy.parse(strategy)), quiet=True)
        checkpoint = newest_whole_checkpoint(run, verify_checkpoint)
        assert checkpoint is not None
        assert (checkpoint.manifest.step, checkpoint.state["strategy"]) == (step, strategy)
        now = tensors(checkpoint.path)
        there = {str(file): file.read_bytes() for file in run.glob("checkpoints/frozen-*/*")}
        files = files or there
        before = before or now
        assert there == files, strategy
        frozen = {name for name in now if not ("mlp" in name or "norm" in name)}
        assert {name for name in now if torch.equal(now[name], before[name])} == (frozen if step > 1 else now.keys())
        before |= {name: t for name, t in now.items() if name not in frozen}
        shared = {name for (name, _), tensor in checkpoint.manifest.tensors.items() if is_kept_beside(tensor)}
        assert shared == frozen, strategy


def test_a_sum_changes_with_every_byte() -> None:
    """One byte, two numbers that swap their places, wherever they are; not with the way in which a tensor is kept."""

    def total(t: Tensor) -> int:
        (value,) = sums_of([Piece("w", "weight", tuple(t.shape), Region(0, t.numel()), t)]).values()
        return value

    t = torch.arange(600_001, dtype=torch.int32).view(torch.uint8)[:-1]
    sums = {total(t)}
    for at in (0, 7, 8, 999_999, 2**21 - 1, 2**21, len(t) - 1):
        other = t.clone()
        other[at] ^= 1
        sums.add(total(other))
    for one, two in ((0, 8), (8, 2**21 + 8)):
        other = t.clone()
        other[one], other[two] = t[two], t[one] + 1
        sums.add(total(other))
    assert len(sums) == 10
    inside = torch.cat([torch.zeros(3, dtype=torch.uint8), t])[3:]
    matrix = torch.arange(12.0).reshape(3, 4)
    assert total(inside) == total(t)
    assert total(matrix.T) == total(matrix.T.contiguous())
    assert total(matrix.T) != total(matrix)
    assert total(torch.zeros((), dtype=torch.bfloat16)) != total(torch.ones((), dtype=torch.bfloat16))
