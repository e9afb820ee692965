"""Checkpoints that other libraries wrote without unipar, imported, and continued with the same losses."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typing_extensions import override

from tests.support.foreign_task import Alike, InGroups
from tests.support.foreign_trainers import DECAY, LAST, RATE, SAVED_AT, TOTAL, adamw, make_net, samples
from tests.support.forks import Forks
from tests.support.world import ROOT
from unipar.backend.checks import read_source
from unipar.checkpoint.importing import reader_process
from unipar.checkpoint.protocol.verifying import CheckpointContents, verify_checkpoint
from unipar.checkpoint.saved_state import SavedState
from unipar.config import Config
from unipar.conversion.import_checkpoint import ImportedCheckpoint, ImportWish, import_checkpoint
from unipar.errors import UniparError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

pytestmark = pytest.mark.forked


def config_file(folder: Path, task: str = "Foreign") -> Path:
    config: dict[str, Any] = {
        "task": {"use": str(ROOT / f"tests/support/foreign_task.py:{task}")},
        "backend": "single",
        "device": "cpu",
        "batch": {"total": TOTAL},
        "data": {"shuffle": False},
        "log": {"every": 1},
        "train": {"steps": LAST, "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY}},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config), "utf-8")
    return file


def config(folder: Path, task: str, sets: Sequence[str] = ()) -> Config:
    return read_source(config_file(folder, task), sets).config


def imported(
    folder: Path, source: Path, task: str = "Foreign", sets: Sequence[str] = (), **wish: Any
) -> tuple[ImportedCheckpoint, CheckpointContents]:
    wish = {"trust_pickle": True} | wish
    done = import_checkpoint(config(folder, task, sets), ImportWish(source, folder / "start", **wish))
    return done, verify_checkpoint(done.path)


def refused(folder: Path, source: Path, **wish: Any) -> str:
    with pytest.raises(UniparError) as caught:
        imported(folder, source, **wish)
    return str(caught.value)


def continued(forks: Forks, folder: Path, start: Path, *sets: str) -> list[float]:
    """Return the losses of a run that goes on from an imported checkpoint."""
    words = ["run", str(config_file(folder)), "--from", str(start), "--set", f"out={folder / 'run'}"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = forks.unipar([*words, *(w for s in sets for w in ("--set", s))], {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return [row["loss"] for row in RunLog.read(run_log_path(folder / "run", 0)) if row["event"] == "step"]


@pytest.mark.parametrize(
    ("library", "ranks", "source"),
    [
        pytest.param("deepspeed-1", 2, "saved", marks=pytest.mark.sweep),
        ("deepspeed-3", 2, "saved"),
        pytest.param("accelerate-ddp", 2, "saved", marks=pytest.mark.sweep),
        ("torch-fsdp", 2, "saved"),
        ("lightning", 1, "saved/last.ckpt"),
        pytest.param("torch-pt", 1, "saved/state.pt", marks=pytest.mark.sweep),
        pytest.param("deepspeed-0", 2, "saved", marks=pytest.mark.sweep),
        pytest.param("deepspeed-2", 3, "saved/global_step3", marks=pytest.mark.sweep),
        pytest.param("deepspeed-3", 3, "saved", marks=pytest.mark.sweep),
        pytest.param("accelerate-pickle", 1, "saved", marks=pytest.mark.sweep),
    ],
)
def test_training_goes_on_with_the_losses_of_the_library_alone(
    forks: Forks, tmp_path: Path, library: str, ranks: int, source: str
) -> None:
    """The library saves after 3 of 8 steps; unipar's last 5 losses, over the end of an epoch, are the library's."""
    words = ["-m", "tests.support.foreign_trainers", library, str(tmp_path)]
    for process in forks.ranks(words, ROOT, size=ranks, timeout=240):
        assert process.returncode == 0, process.stdout + process.stderr
    losses: list[float] = json.loads((tmp_path / "losses.json").read_text("utf-8"))
    done, contents = imported(tmp_path, tmp_path / source)
    assert done.step == SAVED_AT
    assert contents.state["data"] == {"epoch": 0, "sample": SAVED_AT * TOTAL, "length": 24}
    moments = {name for name, kind in contents.manifest.tensors if kind == "exp_avg"}
    assert moments == {"inner.weight", "inner.bias", "out.weight"}
    assert contents.manifest.tensors["shift", "buffer"].shape == (3,)
    assert continued(forks, tmp_path, done.path) == pytest.approx(losses[SAVED_AT:], rel=1e-5)


@pytest.fixture
def readers(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that read pickled files be forks, too."""

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return forks.python(words[1:], ROOT)

    monkeypatch.setattr(reader_process, "subprocess", SimpleNamespace(run=run))


def weights() -> dict[str, Any]:
    return {name: t.clone() for name, t in make_net().state_dict().items()}


def test_weights_alone_from_safetensors(tmp_path: Path) -> None:
    """No pickle, so no consent and no process; bf16 is cast to the run's dtype; the optimizer starts anew."""
    file = tmp_path / "model.safetensors"
    save_file({f"module.{name}": t.bfloat16() for name, t in weights().items()}, file)
    done, contents = imported(tmp_path, file, trust_pickle=False)
    assert done.step == 0
    assert done.remarks == (
        "weights cast from bfloat16 to float32",
        "it holds no state of the optimizer, which starts anew",
    )
    assert {kind for _, kind in contents.manifest.tensors} == {"weight", "buffer"}
    with SavedState(contents.path, contents.manifest) as state:
        assert torch.equal(state.whole("inner.weight", "weight"), weights()["inner.weight"].bfloat16().float())


def test_a_frozen_base_keeps_its_own_dtype(tmp_path: Path) -> None:
    """Weights that the task freezes in bf16 stay so beside trained ones in fp32, whatever the file has them in."""
    file = tmp_path / "model.safetensors"
    save_file({name: t.half() for name, t in weights().items()}, file)
    done, contents = imported(tmp_path, file, "ForeignOnFrozenBase", trust_pickle=False)
    assert done.remarks == (
        "weights cast from float16 to float32",
        "frozen weights cast from float16 to bfloat16",
        "it holds no state of the optimizer, which starts anew",
    )
    dtypes = {name: t.dtype for (name, kind), t in contents.manifest.tensors.items() if kind == "weight"}
    assert [dtypes[name] for name in ("inner.weight", "inner.bias", "out.weight")] == ["BF16", "BF16", "F32"]


@pytest.mark.usefixtures("readers")
def test_other_names_and_weights_only(tmp_path: Path) -> None:
    """--rename replaces beginnings, --weights-only leaves the optimizer out, --step says the step."""
    net = make_net()
    state = {"state_dict": {f"net.{n}": t for n, t in weights().items()}, "optimizer": adamw(net).state_dict()}
    torch.save({**state, "global_step": 7}, tmp_path / "a.pt")
    done, contents = imported(tmp_path, tmp_path / "a.pt", rename=[("net.", "")], weights_only=True, step=4)
    assert (done.step, contents.path.name) == (4, "step-00000004")
    assert contents.state["parts"]["model"]["trained"] == ["inner.weight", "inner.bias", "out.weight"]
    assert contents.state["parts"]["model"]["unsaved"] == ["shift"]
    assert done.remarks == ("it holds no state of the optimizer, which starts anew",)
    assert refused(tmp_path, tmp_path / "a.pt", rename=[("net.", "")], step=4) == (
        f"{contents.path} already exists; name another folder with -o, or delete it"
    )


@pytest.mark.usefixtures("readers")
def test_groups_of_the_task_say_whose_moments_they_are(tmp_path: Path) -> None:
    """Two equal layers in two groups: refused, unless groups(model) says which is in which."""
    net = Alike().model()
    optimizer = torch.optim.AdamW(InGroups().groups(net))
    (net(samples()[0]).square().mean()).backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "a.pt")
    assert "shapes do not tell which of the model's parameters" in refused(tmp_path, tmp_path / "a.pt", task="Alike")
    _, contents = imported(tmp_path, tmp_path / "a.pt", task="InGroups")
    with SavedState(contents.path, contents.manifest) as state:
        for name, p in net.named_parameters():
            assert torch.equal(state.whole(name, "exp_avg"), optimizer.state[p]["exp_avg"])


@pytest.mark.usefixtures("readers")
def test_refusals(tmp_path: Path) -> None:
    """Each source that does not fit has its sentence, also out of the process that reads it."""
    (tmp_path / "empty").mkdir()
    assert (
        refused(tmp_path, tmp_path / "no.pt")
        == f"{tmp_path / 'no.pt'} does not exist; name the library's checkpoint folder or file"
    )
    assert refused(tmp_path, tmp_path / "empty") == (
        f"{tmp_path / 'empty'}: no checkpoint of another library that is known: a folder with model.safetensors, "
        "model.safetensors.index.json, pytorch_model.bin, .metadata or *_model_states.pt, or a file ending in "
        ".safetensors, .pt, .pth, .bin, .ckpt"
    )
    file = tmp_path / "a.pt"
    torch.save(weights(), file)
    assert refused(tmp_path, file, trust_pickle=False) == (
        f"{file} is pickled, and a pickled file can run code when it is read: if you trust where it comes from, say "
        "--trust-pickle; it is then read in a process of its own"
    )
    torch.save({**weights(), "inner.weight": torch.zeros(2, 2)}, file)
    assert refused(tmp_path, file) == f"{file}: inner.weight (weight) has the shape [2, 2], in the model [7, 5]"
    torch.save({n: t for n, t in weights().items() if n != "out.weight"} | {"head": torch.ones(1)}, file)
    assert refused(tmp_path, file) == (
        f"{file} does not have out.weight, which the model has; it has head, which the model does not have; if only "
        "the beginning of names differs: --rename OLD=NEW"
    )
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict()
    torch.save({"model": weights(), "optimizer": other}, file)
    assert refused(tmp_path, file) == (
        f"{file}: the optimizer has 1 parameters by number, and neither all 5 parameters of the model nor the 3 that "
        "are trained fit its shapes in their order; import with --weights-only"
    )
    torch.save({"epoch": 3}, file)
    assert refused(tmp_path, file) == (
        f"{file} holds no state dict: it has the keys epoch; tensors by name are looked for at the top and under "
        "state_dict, model_state_dict, model, module"
    )
    assert not [path for path in (tmp_path / "start").iterdir() if path.name.startswith(".tmp")]


def test_the_place_in_the_data_needs_the_number_of_ranks(tmp_path: Path) -> None:
    """Where it decides about the total batch it must be said, unless there is one rank, or no step was done."""
    file = tmp_path / "model.safetensors"
    save_file(weights(), file)
    sets = ["backend=native", "batch={total: null, micro: 2, accumulate: 1}"]
    assert refused(tmp_path, file, sets=sets, step=4) == (
        f"{file} has done 4 steps, and on how many samples is not known: batch.total is micro x accumulate x data "
        "(2 x 1 x data), and parallel.data is auto; say how many data ranks there were with --set parallel.data=N"
    )
    _, contents = imported(tmp_path, file, sets=[*sets, "parallel.data=2"], step=4)
    assert contents.state["data"] == {"epoch": 0, "sample": 16, "length": 24}
    _, contents = imported(tmp_path, file, sets=["batch={total: null, micro: 2, accumulate: 1}"], step=3)
    assert contents.state["data"] == {"epoch": 0, "sample": 6, "length": 24}
    _, contents = imported(tmp_path, file, sets=sets)
    assert contents.state["data"] == {"epoch": 0, "sample": 0, "length": 24}


@pytest.mark.usefixtures("readers")
def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    """DeepSpeed counts steps that its loss scale skipped; the schedule of the run that goes on waits for them."""
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    saved = {"module": weights(), "global_steps": 5, "skipped_steps": 2, "optimizer": None}
    torch.save(saved, folder / "mp_rank_00_model_states.pt")
    done, contents = imported(tmp_path, folder)
    assert (done.step, contents.state["parts"]["model"]["skipped"]) == (5, 2)
    assert done.remarks == (
        "2 of its steps were skipped because of the loss scale: the schedule stands 2 steps behind",
        "it holds no state of the optimizer, which starts anew",
    )


class Payload:
    """Object that makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @override
    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_code_in_a_pickled_file_does_not_run(tmp_path: Path) -> None:
    """Even where it is trusted: what is not known becomes an inert object, and the weights are imported."""
    file = tmp_path / "a.pt"
    torch.save({"state_dict": weights(), "callbacks": Payload(tmp_path / "ran")}, file)
    imported(tmp_path, file)
    assert not (tmp_path / "ran").exists()
    with file.open("wb") as out:  # as torch wrote files before 1.6
        pickle.dump(Payload(tmp_path / "ran"), out)
    assert "cannot be read as a file of torch.save" in refused(tmp_path, file)
    assert not (tmp_path / "ran").exists()
