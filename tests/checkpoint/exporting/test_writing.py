"""Files that an export writes, read back by the libraries that they are for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.checkpoints import save_on_ranks
from unipar.backend import Region
from unipar.checkpoint.exporting import checkpoint_tensors
from unipar.checkpoint.exporting.checkpoint_tensors import ExportSource
from unipar.checkpoint.exporting.selection import ChosenTensor, parse_rename
from unipar.checkpoint.exporting.writing import Exported, ExportWish, export_checkpoint, parse_size
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave
from unipar.checkpoint.protocol.verifying import CheckpointContents, inspect_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.checkpoint.storage.disk import Disk
from unipar.checkpoint.tensor_bytes import bytes_of, dtype_name
from unipar.errors import CheckpointError, UniparError

TENSORS: dict[tuple[str, str], Tensor] = {
    ("net.a.weight", "weight"): torch.arange(12.0).view(3, 4) / 7,
    ("net.a.weight", "exp_avg"): torch.ones(3, 4),
    ("net.b.weight", "weight"): torch.arange(6.0).view(2, 3) / 3,
    ("net.count", "buffer"): torch.tensor(7),
    ("net.cos", "buffer"): torch.ones(2),
    ("net.nothing", "weight"): torch.zeros(0, 3),
    ("state.seen", "task"): torch.ones(2),
}
STATE: dict[str, Any] = {
    "parts": {
        "model": {
            "tied": [["net.a.weight", "head.weight"]],
            "trained": ["net.a.weight", "net.nothing"],
            "unsaved": ["net.cos"],
        }
    }
}
WEIGHTS = {"net.a.weight", "net.b.weight", "net.count", "net.nothing"}


def saved(folder: Path, tensors: dict[tuple[str, str], Tensor] = TENSORS, **state: Any) -> CheckpointContents:
    """Return a checkpoint whose tensors are in two files, each in two pieces."""

    def pieces(rank: int, step: int) -> Sequence[PieceToSave]:
        mine: list[PieceToSave] = []
        for (name, kind), t in tensors.items():
            half = t.numel() // 2
            where = Region(half, t.numel() - half) if rank else Region(0, half)
            part = t.reshape(-1)[where.start : where.start + where.length].clone()
            called = dtype_name(t, name)
            mine.append(PieceToSave(name, kind, called, tuple(t.shape), where, bytes(bytes_of(part))))
        return mine

    for done in save_on_ranks(folder, 5, disks=[Disk(), Disk()], pieces=pieces, state=state or STATE):
        assert not isinstance(done, BaseException), done
    return inspect_checkpoint(folder / "step-00000005")


def exported(folder: Path, to: str, **wish: Any) -> tuple[Exported, Path]:
    out = folder / "out"
    return export_checkpoint(saved(folder), out, ExportWish(to=to, **wish)), out


def refused(contents: CheckpointContents, out: Path, **wish: Any) -> str:
    with pytest.raises(UniparError) as caught:
        export_checkpoint(contents, out, ExportWish(**wish))
    assert sorted(p.name for p in out.parent.iterdir() if p.name.startswith(".tmp")) == []
    return str(caught.value)


def equal_to_saved(found: dict[str, Tensor], names: set[str], dtype: torch.dtype | None = None) -> None:
    assert set(found) == names
    for name, t in found.items():
        source = "net.a.weight" if name == "head.weight" else name
        want = next(t for (n, kind), t in TENSORS.items() if n == source and kind in ("weight", "buffer"))
        assert torch.equal(t, want.to(dtype) if dtype and want.is_floating_point() else want), name


def test_averages_take_the_place_of_weights(tmp_path: Path) -> None:
    """A weight's average is exported under its name; `--weights raw` takes the weight, and no other word."""
    averages = {("net.a.weight", "average"): torch.full((3, 4), 0.25), ("net.b.weight", "average"): torch.ones(2, 3)}
    contents = saved(tmp_path, TENSORS | averages)
    done = export_checkpoint(contents, tmp_path / "averages", ExportWish())
    found = load_file(tmp_path / "averages")
    assert (done.averages, set(found)) == (2, WEIGHTS)
    assert torch.equal(found["net.a.weight"], torch.full((3, 4), 0.25))
    assert torch.equal(found["net.b.weight"], torch.ones(2, 3))
    done = export_checkpoint(contents, tmp_path / "raw", ExportWish(weights="raw"))
    found = load_file(tmp_path / "raw")
    assert done.averages == 0
    assert all(torch.equal(found[name], TENSORS[name, "weight"]) for name in ("net.a.weight", "net.b.weight"))
    assert refused(contents, tmp_path / "none", weights="avereges") == (
        "--weights avereges: known are averages and raw; did you mean 'averages'?"
    )


def test_one_file(tmp_path: Path) -> None:
    """Weights and persistent buffers; one name of a tied parameter; nothing of the optimizer or the task."""
    done, out = exported(tmp_path, "safetensors")
    equal_to_saved(load_file(out), WEIGHTS)
    assert (done.path, done.tensors, done.files, done.bytes) == (out, 4, 1, 12 * 4 + 6 * 4 + 8)


def test_several_files_with_an_index(tmp_path: Path) -> None:
    """Each file is at most as large as asked, the index names all, and floating point is cast."""
    done, out = exported(tmp_path, "hf", size="24B", dtype="bf16")
    index = json.loads((out / "model.safetensors.index.json").read_text("utf-8"))
    assert index["metadata"] == {"total_size": 12 * 2 + 6 * 2 + 8, "total_parameters": 18}
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    files = {name: load_file(out / name) for name in index["weight_map"].values()}
    equal_to_saved({n: files[file][n] for n, file in index["weight_map"].items()}, WEIGHTS, torch.bfloat16)
    assert done.files == 2


@pytest.mark.parametrize(("to", "dtype"), [("hf", None), ("hf", "bf16"), ("safetensors", "fp64"), ("torch", "bf16")])
def test_one_tensor_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, dtype: str | None
) -> None:
    """When a tensor is read none of those before is in memory, and what is cast is read in parts."""
    alive, regions, read = list[StorageWeakRef](), list[int](), ExportSource.read

    def counted(self: ExportSource, tensor: ChosenTensor) -> Tensor:
        assert [ref.expired() for ref in alive] == [True] * len(alive)
        made = read(self, tensor)
        alive.append(StorageWeakRef(made.untyped_storage()))
        return made

    def part(self: SavedState, name: str, kind: str, where: Region) -> Tensor:
        regions.append(where.numel)
        return call(self, name, kind, where)

    call = SavedState.__call__
    monkeypatch.setattr(ExportSource, "read", counted)
    monkeypatch.setattr(SavedState, "__call__", part)
    monkeypatch.setattr(checkpoint_tensors, "_AT_ONCE", 5)
    done, out = exported(tmp_path, to, dtype=dtype, size="20B")
    assert (len(alive), done.tensors) == (3 if to == "torch" else 4, 4)  # an empty one is not read
    assert max(regions, default=0) == (5 if dtype else 0)
    if to == "hf":
        found = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
        equal_to_saved(found, WEIGHTS, torch.bfloat16 if dtype else None)
        assert done.files == (2 if dtype else 3)


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    """`model.safetensors` alone."""
    _, out = exported(tmp_path, "hf")
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]


def test_a_state_dict_for_torch(tmp_path: Path) -> None:
    """`torch.load` reads it without code; tied names are both there, and share their memory."""
    _, out = exported(tmp_path, "torch")
    found = torch.load(out, weights_only=True)
    equal_to_saved(found, WEIGHTS | {"head.weight"})
    assert found["head.weight"].data_ptr() == found["net.a.weight"].data_ptr()
    assert found["net.b.weight"].untyped_storage().nbytes() == 6 * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_folder_for_distributed_checkpoint(tmp_path: Path) -> None:
    """torch.distributed.checkpoint fills a state dict from it."""
    _, out = exported(tmp_path, "dcp")
    found = {name: torch.zeros(3, 4) for name in ("net.a.weight", "head.weight")}
    found |= {"net.b.weight": torch.zeros(2, 3), "net.count": torch.tensor(0)}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    equal_to_saved(found, set(found))


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ({"only": ["net.?.weight"]}, {"net.a.weight", "net.b.weight"}),
        ({"only": ["head.*", "net.count"]}, {"head.weight", "net.count"}),
        ({"trainable": True}, {"net.a.weight", "net.nothing"}),
        ({"trainable": True, "only": ["net.a*"], "rename": [("net.", ""), ("a", "b")]}, {"a.weight"}),
        ({"only": ["net.b*"], "rename": [("net.", "model.")]}, {"model.b.weight"}),
    ],
)
def test_a_part_and_other_names(tmp_path: Path, wish: dict[str, Any], names: set[str]) -> None:
    """Patterns match tied names too; what was trained; beginnings of names replaced."""
    _, out = exported(tmp_path, "safetensors", **wish)
    assert set(load_file(out)) == names


def test_what_was_trained_is_seen_by_the_optimizers_state(tmp_path: Path) -> None:
    """Where the state names no trained parameters, those count for which the optimizer keeps something."""
    contents = saved(tmp_path, other=1)
    export_checkpoint(contents, tmp_path / "out", ExportWish(trainable=True))
    assert set(load_file(tmp_path / "out")) == {"net.a.weight"}


def test_refusals(tmp_path: Path) -> None:
    """Each wrong wish has its sentence, and leaves nothing behind."""
    contents, out = saved(tmp_path), tmp_path / "out"
    path = contents.path
    assert refused(contents, out, to="tourch") == (
        "--to tourch: known are safetensors, torch, hf, peft, dcp; did you mean 'torch'?"
    )
    assert refused(contents, out, dtype="int8") == "--dtype int8: known are fp32, bf16, fp16, fp64"
    assert refused(contents, out, size="big") == "--size big: not a size; write it as 5GB, 500MB or 2GiB"
    assert refused(contents, out, size="0.1B") == "--size 0.1B: a file must hold at least one byte"
    assert refused(contents, out, only=["lora*"]) == (
        f"--only 'lora*' matches no name in {path}; write one of net.a.weight, net.b.weight, net.cos and 2 more"
    )
    assert refused(contents, out, only=["net.b*"], trainable=True) == (
        f"--trainable and --only net.b* have no name in common in {path}: trained are net.a.weight, net.nothing"
    )
    assert refused(contents, out, rename=[("net.a", "x"), ("net.b", "x")]) == (
        "net.b.weight and net.a.weight would both be called 'x.weight' in the export; choose another --rename, or "
        "fewer tensors with --only"
    )
    assert refused(contents, out, to="peft") == (
        "--to peft: none of the trained names holds 'default' as a part (net.a.weight, net.nothing): the model has no "
        "adapter of that name; say --adapter NAME, or export with --trainable"
    )
    out.touch()
    assert refused(contents, out) == f"-o {out}: it already exists; name another one, or delete it"
    with pytest.raises(CheckpointError) as caught:
        parse_rename("net.")
    assert str(caught.value) == "--rename net.: write OLD=NEW, beginnings of names; 'model.=' takes model. away"


def test_an_export_is_never_empty(tmp_path: Path) -> None:
    """Without a trained parameter, or without weights at all, there is a sentence instead."""
    weights = {key: t for key, t in TENSORS.items() if key[1] in ("weight", "task")}
    contents = saved(tmp_path / "a", weights, other=1)
    assert refused(contents, tmp_path / "out", trainable=True) == (
        f"--trainable: {contents.path} does not say which parameters were trained: it names none, and has no state of "
        "an optimizer; name them with --only 'PATTERN'"
    )
    contents = saved(tmp_path / "b", {key: t for key, t in TENSORS.items() if key[1] == "task"})
    assert refused(contents, tmp_path / "out") == f"{contents.path} holds no weights: there is nothing to export"


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    """A folder that cannot be made is an error with its name."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(saved(tmp_path), tmp_path / "file" / "out", ExportWish())
    assert (
        str(caught.value) == f"-o {tmp_path / 'file' / 'out'}: it cannot be written (File exists); choose another path"
    )


def test_sizes() -> None:
    """Decimal and binary units."""
    assert [parse_size(s) for s in ("5GB", "1.5MB", "2GiB", "10")] == [5 * 10**9, 1_500_000, 2 * 2**30, 10]
