"""Weights from a file: names that are loaded, reported and refused before training."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

import unipar
from tests.conformance.cases import FILE
from tests.conformance.tasks import D, V
from tests.support.running import Line, running
from unipar.config.config_source import load_config_file, load_given_config
from unipar.config.sections.model import Weights
from unipar.errors import BackendNotInstalled, ConfigError
from unipar.model.pretrained import load_weights
from unipar.model.weight_file import describe_loaded_weights, validate_weight_file
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog


class Net(nn.Module):
    """Model with a tied pair, a persistent buffer, a non-persistent one, and a norm with its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("passing", torch.zeros(4), persistent=False)


def _net(seed: int) -> Net:
    torch.manual_seed(seed)
    made = Net()
    made.get_buffer("scale").fill_(seed)
    return made


def _saved(folder: Path, name: str, state: Mapping[str, Any]) -> str:
    file = folder / name
    if file.suffix == ".safetensors":
        save_file({n: t.clone() for n, t in state.items()}, file)
    else:
        torch.save(dict(state), file)
    return str(file)


def _equal(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(t, theirs[n]) for n, t in a.state_dict().items())


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth", "w.bin"])
def test_every_kind_of_file(tmp_path: Path, name: str) -> None:
    """Parameters, buffers and tied names are loaded from every file format."""
    net, other = _net(1), _net(2)
    wanted = Weights(file=_saved(tmp_path, name, other.state_dict()))
    validate_weight_file(wanted, [tmp_path])
    loaded = load_weights(net, wanted)
    assert _equal(net, other)
    assert net.head.weight is net.embed.weight
    assert (loaded.loaded, loaded.names, loaded.missing, loaded.unexpected, loaded.kept) == (10, 10, 0, 0, 0)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers(tmp_path: Path, prefix: str) -> None:
    """Prefixes of DDP and torch.compile are removed, alone and combined, also inside a name."""
    net, other = _net(1), _net(2)
    state = {f"{prefix}{n.replace('body.', 'body._orig_mod.')}": t for n, t in other.state_dict().items()}
    load_weights(net, Weights(file=_saved(tmp_path, "w.pt", state)))
    assert _equal(net, other)


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_weights_among_other_things(tmp_path: Path, key: str) -> None:
    """Weights are found under one of three keys of a checkpoint."""
    net, other = _net(1), _net(2)
    load_weights(net, Weights(file=_saved(tmp_path, "w.pt", {"epoch": 3, key: other.state_dict()})))
    assert _equal(net, other)


def test_one_of_two_tied_names_is_enough(tmp_path: Path) -> None:
    """A tied tensor is loaded by one of its names, as safetensors files hold it once."""
    net, other = _net(1), _net(2)
    state = {n: t for n, t in other.state_dict().items() if n != "head.weight"}
    assert load_weights(net, Weights(file=_saved(tmp_path, "w.safetensors", state))).loaded == 10
    assert _equal(net, other)


def test_another_dtype_is_cast(tmp_path: Path) -> None:
    """Values in bf16 are cast to the model's fp32."""
    net, other = _net(1), _net(2)
    load_weights(net, Weights(file=_saved(tmp_path, "w.pt", other.to(torch.bfloat16).state_dict())))
    assert net.embed.weight.dtype == torch.float32
    assert torch.equal(net.embed.weight, other.embed.weight.float())


def test_a_subset_by_pattern(tmp_path: Path) -> None:
    """Only names that match the patterns are loaded; the others keep their values and are reported."""
    net, untouched, other = _net(1), _net(1), _net(2)
    file = _saved(tmp_path, "w.pt", other.state_dict())
    loaded = load_weights(net, Weights(file=file, only=("body.0.*",)))
    assert torch.equal(net.get_parameter("body.0.weight"), other.get_parameter("body.0.weight"))
    assert torch.equal(net.embed.weight, untouched.embed.weight)
    assert (loaded.loaded, loaded.kept) == (2, 8)
    assert describe_loaded_weights(vars(loaded)) == (
        f"2 of 10 names loaded from {file}; not asked for: embed.weight, body.1.weight, body.1.bias and 5 more"
    )


def test_what_fits_is_taken_where_it_may(tmp_path: Path) -> None:
    """`strict: false` loads common names and reports all others; without it they are refused."""
    net, other = _net(1), _net(2)
    state = {n: t for n, t in other.state_dict().items() if not n.startswith(("head", "embed"))}
    file = _saved(tmp_path, "w.safetensors", state | {"classifier.weight": torch.ones(3, 4)})
    loaded = load_weights(net, Weights(file=file, strict=False))
    assert describe_loaded_weights(vars(loaded)) == (
        f"8 of 10 names loaded from {file}; not in the file: embed.weight, head.weight; "
        "not in the model: classifier.weight"
    )
    with pytest.raises(ConfigError) as e:
        load_weights(net, Weights(file=file))
    assert str(e.value) == (
        f"model.weights: {file} lacks 2 of the model's names (embed.weight, head.weight) and has 1 that the model "
        "lacks (classifier.weight); give strict: false to take what fits, or only: [patterns] to say which names are "
        "meant"
    )


_SUBSET = "leave such names out with only: [patterns]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(3)},
         f"model.weights: FILE: scale is [3] in the file and [4] in the model; {_SUBSET}"),
        ({"scale": torch.ones(3), "body.0.bias": torch.ones(2, 2)},
         "model.weights: FILE: body.0.bias is [2, 2] in the file and [4] in the model (and 1 more that do not fit); "
         f"{_SUBSET}"),
        ({"body.1.num_batches_tracked": torch.tensor(1.5)},
         "model.weights: FILE: body.1.num_batches_tracked is float32 in the file and int64 in the model; " + _SUBSET),
        ({"head.weight": torch.zeros(5, 4)},
         "model.weights: FILE: embed.weight and head.weight are one parameter in the model and have two values in the "
         f"file; {_SUBSET}"),
        ({"module.scale": torch.ones(4)},
         "model.weights: FILE has 'scale' twice, with and without a wrapper's prefix"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model(tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    """Shapes and dtypes of file and model are named if they differ, also with `strict: false`."""
    file = _saved(tmp_path, "w.pt", _net(2).state_dict() | change)
    with pytest.raises(ConfigError) as e:
        load_weights(_net(1), Weights(file=file, strict=False))
    assert str(e.value).replace(file, "FILE") == message


def test_nothing_in_common(tmp_path: Path) -> None:
    """A file without any name of the model is refused, also with `strict: false`."""
    file = _saved(tmp_path, "w.pt", {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ConfigError) as e:
        load_weights(_net(1), Weights(file=file, strict=False))
    assert str(e.value) == (
        f"model.weights: {file} has none of the model's names: it has a, b; the model has embed.weight, body.0.weight, "
        "body.0.bias and 7 more"
    )


def test_no_state_dict(tmp_path: Path) -> None:
    """The error for a file without a state dict names its contents."""
    file = _saved(tmp_path, "w.pt", {"epoch": 3, "optimizer": {"lr": 0.1}})
    with pytest.raises(ConfigError) as e:
        load_weights(_net(1), Weights(file=file))
    assert str(e.value) == (
        f"model.weights: {file} holds no state dict: it has the keys epoch, optimizer; it must hold tensors by name, "
        "at the top level or under state_dict, model_state_dict, model"
    )


class _Evil:
    @override
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def _refused(file: Path | str, folder: Path, **more: Any) -> str:
    """Return the error of the check without torch, with the folder replaced."""
    with pytest.raises(ConfigError) as e:
        validate_weight_file(Weights(file=str(file), **more), [folder])
    return str(e.value).replace(str(folder), "DIR")


def test_code_in_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled code is named and never run, neither by the check nor by loading."""
    monkeypatch.chdir(tmp_path)
    file = _saved(tmp_path, "w.pt", {"weight": torch.ones(1), "x": _Evil()})
    said = (
        "model.weights: DIR/w.pt holds pickled code (posix.mkdir), which would run when it is read; save the weights "
        "alone: torch.save(model.state_dict(), file), or as safetensors"
    )
    assert _refused(file, tmp_path) == said
    with pytest.raises(ConfigError) as e:
        load_weights(_net(1), Weights(file=file))
    assert str(e.value).replace(str(tmp_path), "DIR") == said
    assert not (tmp_path / "evil").exists()


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    """Truncated files of both formats are refused at any length."""
    for name in ("w.safetensors", "w.pt"):
        whole = Path(_saved(tmp_path, name, _net(2).state_dict())).read_bytes()
        for part in (0, 5, 100, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:part])
            assert _refused(tmp_path / name, tmp_path).startswith(f"model.weights: DIR/{name} is damaged: ")
    (tmp_path / "w.safetensors").write_bytes((30).to_bytes(8, "little") + b'{"a": "b"}' + b" " * 20)
    assert _refused(tmp_path / "w.safetensors", tmp_path).endswith("damaged: its header is not what safetensors writes")
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("readme", "hello")
    assert _refused(tmp_path / "w.pt", tmp_path) == (
        "model.weights: DIR/w.pt is damaged: there is no data.pkl in it, so torch.save did not write it"
    )


def test_a_header_whose_tensors_overlap(tmp_path: Path) -> None:
    """An inconsistent header of the right length is refused by the library, before training."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(ConfigError, match=r"^model.weights: .*/w.safetensors is damaged: .*[Ii]nvalid"):
        load_weights(_net(1), Weights(file=str(tmp_path / "w.safetensors")))


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    """A missing file, a folder, another suffix and a pattern without a match are refused."""
    (tmp_path / "d.pt").mkdir()
    file = _saved(tmp_path, "w.safetensors", {"module.body.0.weight": torch.ones(1)})
    validate_weight_file(Weights(file=file, only=("body.*",)), [tmp_path])
    assert (
        _refused(tmp_path / "x.pt", tmp_path)
        == "model.weights: DIR/x.pt does not exist; the path is relative to the config"
    )
    assert _refused(tmp_path / "d.pt", tmp_path) == (
        "model.weights: DIR/d.pt is a folder with neither model.safetensors.index.json nor model.safetensors; "
        "name a file in it"
    )
    assert _refused(tmp_path / "w.npz", tmp_path) == (
        "model.weights: DIR/w.npz ends in .npz; it must be one of .safetensors, .pt, .pth, .bin"
    )
    assert _refused(file, tmp_path, only=["body.*", "hed.*"]) == (
        "model.weights.only: 'hed.*' matches none of the names in DIR/w.safetensors (body.0.weight)"
    )


def test_a_link_out_of_the_tree(tmp_path: Path) -> None:
    """A link is followed within the config's folder and the working directory; one that leaves both is refused."""
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    tree.mkdir()
    elsewhere.mkdir()
    _saved(elsewhere, "w.pt", {"a": torch.ones(1)})
    _saved(tree, "w.pt", {"a": torch.ones(1)})
    (tree / "in.pt").symlink_to(tree / "w.pt")
    (tree / "out.pt").symlink_to(elsewhere / "w.pt")
    (elsewhere / "link.pt").symlink_to(elsewhere / "w.pt")
    validate_weight_file(Weights(file=str(tree / "in.pt")), [tree])
    validate_weight_file(Weights(file=str(elsewhere / "link.pt")), [tree])  # named from outside: what it is, is seen
    validate_weight_file(Weights(file=str(tree / "out.pt")), [tree, elsewhere])
    with pytest.raises(ConfigError) as e:
        validate_weight_file(Weights(file=str(tree / "out.pt")), [tree])
    assert str(e.value).replace(str(tmp_path), "DIR") == (
        "model.weights: DIR/tree/out.pt is a link that leads out of DIR/tree, to DIR/elsewhere/w.pt; "
        "name that file itself"
    )


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a missing safetensors names the command that installs it."""
    file = _saved(tmp_path, "w.safetensors", {"a": torch.ones(1)})
    monkeypatch.setattr("unipar.model.weight_file.find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(BackendNotInstalled) as e:
        validate_weight_file(Weights(file=file), [tmp_path])
    assert str(e.value) == (
        f"model.weights: {file} needs safetensors, not installed here: pip install 'unipar[weights]'"
    )


def test_relative_to_what_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the config's folder, or to the working directory for --set and scripts."""
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "x.yaml"
    file.write_text("model: {weights: ../w.pt}\nbatch: {total: 4}\ntrain: {steps: 1}\n", "utf-8")
    assert load_config_file(file).config.model.weights == str(tmp_path / "w.pt")
    monkeypatch.chdir(tmp_path)
    wanted = load_config_file(file, ["model.weights={file: v.pt, strict: false}"]).config.model.loading
    assert wanted == Weights(file=str(tmp_path / "v.pt"), strict=False)
    plain = load_given_config({"batch": {"total": 4}, "train": {"steps": 1}, "model": {"weights": "u.pt"}})
    assert plain.config.model.loading == Weights(file=str(tmp_path / "u.pt"))


@pytest.mark.parametrize("start", [unipar.launch, unipar.compare, unipar.verify])
def test_refused_before_any_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """A missing file is refused before a run folder is made."""
    monkeypatch.chdir(tmp_path)
    config = {"batch": {"total": 4}, "train": {"steps": 1}, "model": {"weights": "w.pt"}, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"w\.pt does not exist; the path is relative to the config$"):
        start(config, task=Line)
    assert list(tmp_path.iterdir()) == []


def test_told_in_the_run_log(tmp_path: Path) -> None:
    """Rank 0 records what was loaded, and training starts from it."""
    file = _saved(tmp_path, "w.pt", {"weight": torch.tensor([[2.0]])})
    with running(Line(), tmp_path, model={"weights": file}) as run:
        losses = [run.step(local_batch).loss for local_batch in run.batches()]
    assert losses[0] == 0.0
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row["event"] for row in rows[:2]] == ["start", "weights"]
    assert describe_loaded_weights(rows[1]) == f"1 of 1 names loaded from {file}"


def test_the_file_of_the_conformance_suite() -> None:
    """The stored file has the values that these lines compute."""
    made = {"module.embed.weight": torch.linspace(-1, 1, V * D).reshape(V, D)}
    made["module.head.weight"] = -made["module.embed.weight"]
    from safetensors.torch import load_file

    held = load_file(FILE)
    assert held.keys() == made.keys()
    assert all(torch.equal(held[name], made[name]) for name in made)
