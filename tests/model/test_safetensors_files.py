"""A folder of weights with an index: what it must be, and that its tensors are read in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from tests.support.running import Line, running
from unipar.backend.engine import Region
from unipar.backend.file_values import file_values
from unipar.config import Config
from unipar.config.sections.model import Weights
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.errors import ConfigError
from unipar.model.create import create_parts
from unipar.model.pretrained import load_weights, point_to_weights
from unipar.model.weight_file import validate_weight_file
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.seeding import seed_all

INDEX = "model.safetensors.index.json"


class Tied(nn.Module):
    """Model with a tied pair, of which transformers saves one name, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("passing", torch.full((4,), 2.0), persistent=False)


def folder(tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None] | None = None) -> Path:
    """Return a folder with two files as transformers writes it; `change` may spoil tensors and index first."""
    made = tmp_path / "weights"
    made.mkdir()
    torch.manual_seed(3)
    tensors = {name: t.clone() for name, t in Tied().state_dict().items() if name != "head.weight"}
    tensors["scale"].fill_(0.5)
    placed = {name: f"model-0000{1 + (name != 'embed.weight')}-of-00002.safetensors" for name in tensors}
    if change is not None:
        change(tensors, placed)
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({name: t for name, t in tensors.items() if placed.get(name, file) == file}, made / file)
    (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}), "utf-8")
    return made


def empty_model(make: Callable[[], Any] = Tied) -> nn.Module:
    config = Config.model_validate({"train": {"steps": 1}, "batch": {"total": 1}})
    place = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="unipar")
    world = World(place, torch.device("cpu"), None)
    try:
        return create_parts(make, config, world, empty=True)["model"]
    finally:
        world.close()


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    """All names of both files, the tied one under its first name only, as transformers leaves them."""
    weights = Weights(file=str(folder(tmp_path)))
    validate_weight_file(weights, [tmp_path])
    net = Tied()
    loaded = load_weights(net, weights)
    assert (loaded.names, loaded.loaded, loaded.missing, loaded.unexpected) == (5, 5, 0, 0)
    torch.manual_seed(3)
    assert torch.equal(net.head.weight, Tied().embed.weight)
    assert net.get_buffer("scale").tolist() == [0.5] * 4


def test_parameters_stay_in_the_files(tmp_path: Path) -> None:
    """Parameters are on meta until they are placed, ties hold, buffers have their values; reads are counted."""
    net = empty_model()
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert net.get_parameter("head.weight") is net.get_parameter("embed.weight")
    assert net.get_buffer("passing").tolist() == [2.0] * 4
    found = point_to_weights(net, Weights(file=str(folder(tmp_path))))
    assert found is not None
    loaded, files = found
    assert (loaded.loaded, files.bytes_read) == (5, 16)  # the buffer
    assert net.get_buffer("scale").tolist() == [0.5] * 4
    values = file_values(net.get_parameter("embed.weight"))
    assert values is not None
    torch.manual_seed(3)
    whole = Tied().embed.weight.detach()
    for where in (Region(4, 8), Region(1, 2, 4, 5), Region(0, 24), Region(3, 0)):
        for dtype in (torch.float32, torch.float64):
            out = torch.empty(where.numel, dtype=dtype)
            values.read_into(where, out)
            assert torch.equal(out, where.of(whole).reshape(-1).to(dtype))
    assert files.bytes_read == 16 + 2 * 4 * (8 + 10 + 24)


def test_a_constructor_that_reads_its_parameters() -> None:
    """A model that cannot be created without values is created with them, under the same seed."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.norm = float(self.weight.norm().item())

    made = empty_model(Scaled)
    assert {p.device.type for p in made.parameters()} == {"cpu"}


class _Draws(nn.Linear):
    """Draws numbers for a plain tensor, which no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.noise = torch.randn(3)


class _Copies(nn.Linear):
    """Keeps what its parameters were at first, in a list."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.first = [self.weight.detach().clone()]


class _Averages(nn.Linear):
    """Has a buffer that is made of its parameters."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("average", self.weight.detach().clone())


class _Named(nn.Parameter):
    """Parameter of a class of its own."""


class _Special(nn.Module):
    """Has a parameter of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _Named(torch.ones(2))


@pytest.mark.parametrize("make", [_Draws, _Copies, _Averages, _Special])
def test_a_constructor_of_more_than_parameters(make: Callable[[], nn.Module]) -> None:
    """Models with tensors that would be others, or be lost, are created with values: the same as anywhere else."""
    made = empty_model(make)
    assert {p.device.type for p in made.parameters()} == {"cpu"}
    seed_all(0)
    other = make()
    assert all(map(torch.equal, made.state_dict().values(), other.state_dict().values()))
    if make is _Draws:
        assert torch.equal(vars(made)["noise"], vars(other)["noise"])


def test_marks_of_parameters_stay() -> None:
    """Attributes that a task's groups() looks at are there on rank 0 as on the others."""

    class Marked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            bias = nn.Parameter(torch.zeros(2))
            vars(bias)["no_decay"] = True
            self.bias = bias

    made = empty_model(Marked)
    assert {p.device.type for p in made.parameters()} == {"meta"}
    assert [getattr(p, "no_decay", False) for p in made.parameters()] == [False, True]


def test_names_that_the_files_lack_keep_their_values(tmp_path: Path) -> None:
    """With `only` the model has to be created with values, and nothing is pointed to."""
    wanted = Weights(file=str(folder(tmp_path)), only=("body.*",))
    assert point_to_weights(empty_model(), wanted) is None


def _drop(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    del tensors["body.bias"], placed["body.bias"]


def _add(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    tensors["more"] = torch.ones(1)
    placed["more"] = placed["body.bias"]


def _reshape(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    tensors["body.bias"] = torch.ones(5)


def _as_integers(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    tensors["body.bias"] = torch.ones(4, dtype=torch.int64)


def _untie(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    tensors["head.weight"] = tensors["embed.weight"] + 1
    placed["head.weight"] = placed["body.bias"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_drop, "lacks 1 of the model's names (body.bias); give strict: false to take what fits, or only: [patterns] "
         "to say which names are meant"),
        (_add, "has 1 that the model lacks (more); give strict: false to take what fits, or only: [patterns] to say "
         "which names are meant"),
        (_reshape, "body.bias is [5] in the file and [4] in the model; leave such names out with only: [patterns]"),
        (_as_integers, "body.bias is int64 in the file and float32 in the model; leave such names out with only: "
         "[patterns]"),
        (_untie, "embed.weight and head.weight are one parameter in the model and have two values in the file; leave "
         "such names out with only: [patterns]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, sentence: str) -> None:
    """The same sentence, whether values are copied at once or read later."""
    weights = Weights(file=str(folder(tmp_path, change)))
    said: list[str] = []
    for load, net in ((load_weights, Tied()), (point_to_weights, empty_model())):
        with pytest.raises(ConfigError) as caught:
            load(net, weights)
        said.append(str(caught.value).removeprefix(f"model.weights: {tmp_path}/weights").lstrip(": "))
    assert said == [sentence] * 2


def _outside(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    placed["body.bias"] = "../secret.safetensors"


def _elsewhere(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    placed["body.bias"] = "model-00001-of-00002.safetensors"
    placed["gone"] = "model-00003-of-00003.safetensors"


def _lacks(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    placed["gone"] = "model-00001-of-00002.safetensors"


def _unsaid(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    tensors["more"] = torch.ones(1)


def _nothing(tensors: dict[str, Tensor], placed: dict[str, str]) -> None:
    placed.clear()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_outside, "{}/model.safetensors.index.json says that body.bias is in '../secret.safetensors'; it must name a "
         "safetensors file in the folder"),
        (_elsewhere, "{}/model.safetensors.index.json names model-00003-of-00003.safetensors, which is not in the "
         "folder; download or copy it"),
        (_lacks, "{}/model-00001-of-00002.safetensors does not have gone, which the index names; "
          "download the folder again"),
        (_unsaid, "{}/model-00001-of-00002.safetensors has more, which the index does not name; "
         "download the folder again"),
        (_nothing, "{}/model.safetensors.index.json is no index: it has no weight_map from names to files"),
    ],
)  # fmt: skip
def test_an_index_that_is_wrong(tmp_path: Path, change: Any, sentence: str) -> None:
    """Refused before any process starts, with the name of the tensor and the file."""
    made = folder(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        validate_weight_file(Weights(file=str(made)), [tmp_path])
    assert str(caught.value) == "model.weights: " + sentence.format(made)


def test_folders_that_hold_no_weights(tmp_path: Path) -> None:
    """Neither index nor file; a file that is a link out of the folder; a truncated file."""
    with pytest.raises(ConfigError) as caught:
        validate_weight_file(Weights(file=str(tmp_path)), [])
    assert (
        str(caught.value)
        == f"model.weights: {tmp_path} is a folder with neither {INDEX} nor model.safetensors; name a file in it"
    )
    made = folder(tmp_path)
    file = made / "model-00001-of-00002.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{file} is a link that leads out of {made}, to {tmp_path}/elsewhere"):
        validate_weight_file(Weights(file=str(made)), [tmp_path])
    file.unlink()
    file.write_bytes((tmp_path / "elsewhere").read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"bytes, but it has .*: it is truncated"):
        validate_weight_file(Weights(file=str(made)), [tmp_path])


def test_a_run_reads_its_shards(tmp_path: Path) -> None:
    """native/parameters: the values are those of the files, and the run log says how many bytes this rank has read."""

    class Small(Line):
        @override
        def model(self) -> Any:
            return nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))

    torch.manual_seed(9)
    state = {name: t.clone() for name, t in Small().model().state_dict().items()}
    made = tmp_path / "weights"
    made.mkdir()
    save_file(state, made / "model.safetensors")
    settings = {"backend": "native", "parallel": {"data": 1, "shard": "parameters"}, "model": {"weights": str(made)}}
    (tmp_path / "run").mkdir()
    with running(Small(), tmp_path / "run", **settings) as run:
        held = {p.name: p.tensor.clone() for p in run.pieces() if p.kind == "weight"}
        run.done = run.steps
    assert held.keys() == state.keys()
    assert all(torch.equal(t.flatten(), state[name].flatten()) for name, t in held.items())
    (row,) = (row for row in RunLog.read(run_log_path(tmp_path / "run", 0)) if row["event"] == "weights read")
    assert row["bytes"] == 40
