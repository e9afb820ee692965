"""Strategies that train differently are not compared: initial values, samples and precision, as ranks record them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compared_rows import marks
from tests.support.forks import Forks
from tests.support.scalings import made, timed
from unipar.backend import Region
from unipar.engines.fingerprint import fingerprint_batch, hash_sample_keys, hash_tensor_region
from unipar.errors import ReportError
from unipar.results.same_training import TrainingMarks, describe_training_difference, rank_marks_path

ROOT = Path(__file__).parents[2]

TASK = '''
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import unipar


class Sums(unipar.Task):
    """Task with a planted difference in worlds of two."""

    def __init__(self, plant=""):
        self.plant = plant

    def model(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        model[1].requires_grad_(self.plant != "frozen")
        return model

    def data(self):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        if self.plant == "data" and dist.get_world_size() == 2:
            x[-16:] += 1
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.plant == "cast" and dist.get_world_size() == 2):
            return nn.functional.mse_loss(model(batch[0]), batch[1])
'''


# Arithmetic


def hash_whole(tensor: Tensor) -> int:
    return hash_tensor_region(tensor, Region(0, tensor.numel()))


def test_the_same_bits_have_the_same_number_however_they_are_cut() -> None:
    """In one range or in three; in another order or with another bit it is another one."""
    whole = torch.randn(600_000, generator=torch.Generator().manual_seed(0))
    parts = [(0, 5), (5, 400_000), (400_000, 600_000)]
    assert sum(hash_tensor_region(whole[a:b], Region(a, b - a)) for a, b in parts) % 2**64 == hash_whole(whole)
    assert hash_whole(whole.flip(0)) != hash_whole(whole)
    other = whole.clone()
    other[77] = torch.nextafter(other[77], torch.tensor(9.0))
    assert hash_whole(other) != hash_whole(whole)
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        cast = whole[:999].to(dtype)
        assert (hash_whole(cast[:7]) + hash_tensor_region(cast[7:], Region(7, 992))) % 2**64 == hash_whole(cast)


def test_a_batch_that_has_no_plain_bytes() -> None:
    """A sparse or nested tensor is left out of its number."""
    dense = torch.eye(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert fingerprint_batch({"a": dense.to_sparse(), "n": nested}) == ""
    assert fingerprint_batch({"a": dense.to_sparse(), "b": dense}) == fingerprint_batch({"b": dense}) != ""


def test_samples_have_one_number_in_any_order() -> None:
    """Added up over ranks, too; another epoch is another sample."""
    keys = [(0, 3), (0, 1), (1, 7)]
    assert (hash_sample_keys(keys[:1]) + hash_sample_keys(keys[:0:-1])) % 2**64 == hash_sample_keys(keys)
    assert hash_sample_keys([(0, 3), (1, 1), (1, 7)]) != hash_sample_keys(keys)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        (
            {"values": {"a": "01", "b": "09", "c": "09"}},
            "b (and 1 other parameter) starts with other values than in single: model() must depend on train.seed only",
        ),
        ({"samples": ((8, "0a"), (4, "0c"))}, "step 2 trains on 4 samples, but on 8 in single"),
        ({"samples": ((8, "0a"), (8, "0c"))}, "step 2 trains on other samples than in single"),
        (
            {"batches": (("x", "z"),)},
            "step 1 has other values for the same samples than in single: what data() returns must depend on the index "
            "and the seed only",
        ),
        (
            {"computed": ("bfloat16",)},
            "it computes in bfloat16 and keeps weights in float32, but single computes in float32 and keeps weights in "
            "float32, although both have train.precision fp32",
        ),
        (
            {"kept": ("bfloat16",), "computed": ()},
            "it keeps weights in bfloat16, but single computes in float32 and keeps weights in float32, although both "
            "have train.precision fp32",
        ),
        ({"batches": (("x",),)}, ""),
        ({"computed": ()}, ""),
        ({"readers": 2, "samples": ((8, "0c"),)}, ""),
        ({"precision": "bf16-master", "computed": ("bfloat16",)}, ""),
    ],
)
def test_what_is_unlike_is_a_sentence(changed: dict[str, Any], said: str) -> None:
    """Cut otherwise, not looked at, read by ranks or asked otherwise, it says nothing."""
    assert describe_training_difference(marks(**changed), {"single": marks()}) == said


def test_a_parameter_that_no_rank_holds_is_named() -> None:
    """Each element is on one rank at least; ranks may hold different parameters, as stages of a pipeline do."""
    parts = ({"a": "01"}, {"b": "02", "c": "03"})
    assert describe_training_difference(marks(values=parts[0] | parts[1]), {"single": marks()}) == ""
    said = "b (and 1 other parameter) is trained in single, and none of the ranks here holds it"
    assert describe_training_difference(marks(values=parts[0]), {"single": marks()}) == said
    more = marks(values={"a": "01", "b": "02", "c": "03", "d": "04"})
    said = "d is trained here, and none of the ranks of single holds it"
    assert describe_training_difference(more, {"single": marks()}) == said


def test_marks_of_ranks_that_hold_different_parameters(tmp_path: Path) -> None:
    """Values of all ranks are put together; samples are those of the ranks that lead."""
    told = {"kept": ["float32"], "computed": ["float32"], "readers": 0, "total": 8, "precision": "fp32"}
    for rank, values in enumerate(({"a": 1, "tied": 5}, {"b": 2})):
        read = {"batches": [["x", "y"]], "samples": [(8, 10)], "leads": rank == 1}
        rank_marks_path(tmp_path, rank).write_text(json.dumps(told | read | {"values": values}), encoding="utf-8")
    found = TrainingMarks.read(tmp_path, 2)
    assert found.values == {"a": f"{1:016x}", "tied": f"{5:016x}", "b": f"{2:016x}"}
    assert (found.samples, found.batches) == (((8, f"{10:016x}"),), (("x", "y"),))


def test_worlds_with_other_batches_are_held_to_their_like() -> None:
    """In weak scaling the batch grows: values are those of all, samples those of its own kind."""
    grown = marks(total=16, samples=((16, "0d"),))
    assert describe_training_difference(grown, {"x1": marks()}, one_total=False) == ""
    assert describe_training_difference(grown, {"x1": marks()}) == "step 1 trains on 16 samples, but on 8 in x1"
    others = {"x1": marks(), "y2": marks(total=16, samples=((16, "0e"),))}
    assert describe_training_difference(grown, others, one_total=False) == "step 1 trains on other samples than in y2"


def test_a_size_that_trained_otherwise_gets_no_figures() -> None:
    """The first size is the reference for the others, and the exit code is 1."""
    found = made(
        timed("native/nothing", 1, 0.08, "strong"),
        timed("native/nothing", 2, 0.05, "strong"),
        timed("native/parameters", 1, 0.08, "strong"),
        verb="compare",
    )
    seen = (marks(), marks(values={"a": "01", "b": "09", "c": "03"}), marks())
    rows = [row.changed(marks=m) for row, m in zip(found.rows, seen, strict=True)]
    sifted = found.changed(rows=rows).mark_different_training()
    assert [row.outcome for row in sifted.rows] == ["ran", "unlike", "ran"]
    assert sifted.rows[1].note == (
        "b starts with other values than in native/nothing x1 strong: model() must depend on train.seed only"
    )
    assert sifted.efficiency(sifted.worlds[1]) is None
    assert "native/nothing         2  strong   trained differently: b starts with other values" in sifted.table(120)
    assert (found.changed(rows=rows).code, sifted.code) == (0, 1)
    wrong = found.changed(wrong=("2 ranks: DISAGREES: native/nothing by 1",))
    assert (wrong.code, wrong.remarks()[0]) == (1, "2 ranks: DISAGREES: native/nothing by 1")


def test_a_rank_that_wrote_nothing_is_a_sentence(tmp_path: Path) -> None:
    """Or not all of it."""
    file = rank_marks_path(tmp_path, 0)
    for text in (None, '{"values'):
        if text is not None:
            file.write_text(text, encoding="utf-8")
        with pytest.raises(ReportError) as e:
            TrainingMarks.read(tmp_path, 1)
        assert str(e.value) == f"{file} does not say what rank 0 trained on"


# For real


def compared(forks: Forks, folder: Path, *strategies: str, plant: str = "", precision: str = "fp32") -> dict[str, Any]:
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    told = {
        "task": {"use": "task.py:Sums", "args": {"plant": plant}},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 6, "precision": precision},
        "compare": {"strategies": strategies, "repeat": 2, "memory": False},
        "out": str(folder / "out"),
    }
    (folder / "x.yaml").write_text(json.dumps(told), encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "faulty"), str(ROOT)])
    done = forks.unipar(["compare", str(folder / "x.yaml")], {"PYTHONPATH": path, "COLUMNS": "400"})
    data = json.loads((folder / "out/compare/compare.json").read_text("utf-8"))
    return {"code": done.returncode, "said": done.stdout, **{row["strategy"]: row for row in data["strategies"]}}


def test_an_engine_that_begins_otherwise_is_not_ranked(forks: Forks, tmp_path: Path) -> None:
    """One of its parameters; the other strategies are compared, of the same values in whichever way they are split."""
    strategies = ("native/optimizer", "native/parameters", "faulty/nothing+other-start", "faulty/nothing+same-samples")
    found = compared(forks, tmp_path, *strategies)
    assert found["code"] == 1
    row = found["faulty/nothing+other-start"]
    assert (row["outcome"], row["losses"], row["seconds"]) == ("unlike", [], [])
    assert row["note"] == ("2.bias starts with other values than in single: model() must depend on train.seed only")
    assert f"faulty/nothing+other-start   trained differently: {row['note']}\n" in found["said"]
    assert found["faulty/nothing+same-samples"]["note"] == "step 1 trains on other samples than in single"
    for strategy in ("native/optimizer", "native/parameters"):
        assert found[strategy]["outcome"] == "ran"
        assert found[strategy]["marks"] == found["single"]["marks"]
    assert [count for count, _ in found["single"]["marks"]["samples"]] == [8] * 6
    assert len(found["single"]["marks"]["batches"]) == 2


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (
            "data",
            "step 1 has other values for the same samples than in single: what data() returns must depend on the index "
            "and the seed only",
        ),
        (
            "cast",
            "it computes in bfloat16 and keeps weights in float32, but single computes in float32 and keeps weights in "
            "float32, although both have train.precision fp32",
        ),
    ],
)
def test_a_task_that_does_something_else_in_a_strategy(forks: Forks, tmp_path: Path, plant: str, said: str) -> None:
    """Other contents behind the same numbers; another precision."""
    row = compared(forks, tmp_path, "native/nothing", plant=plant)["native/nothing"]
    assert (row["outcome"], row["note"]) == ("unlike", said)


def test_what_is_frozen_may_be_kept_in_any_precision(forks: Forks, tmp_path: Path) -> None:
    """Nobody moves it: DeepSpeed keeps it in bf16, where FSDP2 keeps what it gathers from in fp32."""
    strategies = ("native/parameters", "deepspeed/optimizer")
    found = compared(forks, tmp_path, *strategies, plant="frozen", precision="bf16-master")
    assert [found[strategy]["outcome"] for strategy in ("single", *strategies)] == ["ran"] * 3, found["said"]
    assert [found[strategy]["marks"]["computed"] for strategy in ("single", *strategies)] == [
        ["float32"],
        *[["bfloat16"]] * 2,
    ]
    assert found["single"]["marks"]["values"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert len({str(found[strategy]["marks"]["values"]) for strategy in strategies}) == 1
