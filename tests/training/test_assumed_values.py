"""Losses that choose by value: planned with assumed places, or with all that a mask could select."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from unipar.config.config_source import load_given_config
from unipar.errors import TaskError
from unipar.training.fake_run.assumed_values import choose_places
from unipar.training.fake_run.trace_task import TracedTask, trace_task

EXPERTS, WIDTH, TEXT = 4, 6, 5


class Mixture(unipar.Task):
    """Two experts of four for each of five words of a sample, each of which runs on the words that choose it."""

    @override
    def model(self) -> nn.Module:
        parts = {"router": nn.Linear(4, EXPERTS), "experts": nn.ModuleList(nn.Linear(4, WIDTH) for _ in range(EXPERTS))}
        return nn.ModuleDict(parts)

    @override
    def data(self) -> Any:
        return TensorDataset(torch.ones(64, TEXT, 4))

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        words = batch[0].reshape(-1, 4)
        weights, chosen = model["router"](words).topk(2)
        out = words.new_zeros(len(words), WIDTH)
        for number, expert in enumerate(model["experts"]):
            at, place = torch.where(chosen == number)
            if (chosen == number).any():
                out = out.index_add(0, at, expert(words[at]) * weights[at, place, None])
        return out.square().mean()


class Masked(Mixture):
    """Loss over the elements that are positive."""

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        out = model["experts"][0](batch[0])
        return out[out > 0].sum() + out.masked_select(out < 0).sum()


class LeavingOut(Mixture):
    """A layer that is left out by chance, as transformers' wav2vec2 does, and one that is kept so, as peft's LoHa."""

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        out = batch[0]
        if not torch.rand([]) < 0.9:
            out = torch.cat([out, model["experts"][0](out)], -1)
        if torch.rand(1) > 0.9:
            out = torch.cat([out, model["experts"][1](batch[0])], -1)
        return out.sum()


class Branching(Mixture):
    """Control flow by a sum of numbers."""

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        out = model["experts"][0](batch[0])
        return out.sum() if out.sum() > 0 else out.square().sum()


class Grouped(Mixture):
    """One product for all groups of words."""

    @override
    def model(self) -> nn.Module:
        return nn.ParameterDict({"experts": nn.Parameter(torch.ones(EXPERTS, 4, 6))})

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        words = batch[0].reshape(-1, 4)
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(words) // EXPERTS)
        return torch.nn.functional.grouped_mm(words, model["experts"], offs=ends).square().sum()


def traced(task: unipar.Task, **train: Any) -> TracedTask:
    given = {"task": {"use": f"{__file__}:{type(task).__name__}"}, "batch": {"total": 8}, "device": "cpu"}
    return trace_task(load_given_config(given | {"train": {"steps": 1, **train}}).config, 4, task)


def sizes(found: TracedTask, operation: str, micro: int) -> list[int]:
    return [block.size(micro) for block in found.activations.blocks if block.operation == operation]


def test_rows_that_choose_experts() -> None:
    """Each expert gets a word, all others go to the first two: 19 of 20 words each, and 39 of 40."""
    found = traced(Mixture())
    for micro, words in ((4, 19), (8, 39)):
        rows = [size // 4 // WIDTH for size in sizes(found, "addmm.default", micro)]
        assert rows[1:5] == [words, words, 1, 1]  # behind the router's
    assert found.even
    assert found.assumed == (
        "the loss sends rows to places that it chooses by value (experts of a mixture): planned is that each place "
        "gets a row and all others go to the first ones, which takes the most memory at once",
    )


@pytest.mark.parametrize(
    ("rows", "each", "places", "wanted"),
    [
        (4, 1, 3, [[0], [1], [2], [0]]),
        (3, 2, 4, [[0, 1], [2, 3], [0, 1]]),
        (3, 2, 3, [[0, 1], [2, 0], [0, 1]]),
        (1, 2, 8, [[0, 1]]),
    ],
)
def test_places_of_rows(rows: int, each: int, places: int, wanted: list[list[int]]) -> None:
    """No row chooses a place twice, and each place is chosen if there are rows enough."""
    assert choose_places(rows, each, places).tolist() == wanted


def test_masks_of_numbers() -> None:
    """A mask may select everything."""
    found = traced(Masked())
    assert sizes(found, "index.Tensor", 4) == [4 * TEXT * WIDTH * 4]
    assert sizes(found, "masked_select.default", 4) == [4 * TEXT * WIDTH * 4]
    assert found.assumed == (
        "the loss selects by value (masked_select, nonzero): planned is that it selects everything, so that peaks are "
        "upper bounds",
    )


def test_layers_left_out_by_chance() -> None:
    """Both run."""
    found = traced(LeavingOut())
    assert sizes(found, "cat.default", 4) == [4 * TEXT * (4 + WIDTH) * 4, 4 * TEXT * (4 + 2 * WIDTH) * 4]
    assert found.assumed == (
        "the loss draws single numbers by chance, as to leave out a layer: planned is that each is nearly 1, so that "
        "what is left out with a probability is not left out",
    )


def test_control_flow_by_numbers() -> None:
    """What no assumption can tell is refused."""
    with pytest.raises(TaskError) as e:
        traced(Branching())
    assert str(e.value) == (
        "plan: loss() needs the values of a tensor (aten._local_scalar_dense.default), and a plan computes without "
        "values: keep such numbers in Python, or choose by shapes"
    )


def test_products_of_groups() -> None:
    """In fp32, too: rows of the result lie 16 bytes apart or a multiple, and operations are counted."""
    found = traced(Grouped())
    assert sizes(found, "_grouped_mm.default", 4)[0] == (19 * 8 + 6) * 4  # rows of 6 are 8 apart
    assert found.activations.flops[1] * 4 == 2 * (2 * 20 * 4 * 6)  # forward, and the gradient of the experts
    assert found.assumed == ()


def test_a_plan_tells_what_it_assumes() -> None:
    """Among its notes."""
    task = {"use": f"{__file__}:Masked"}
    config: dict[str, Any] = {"task": task, "device": "cpu", "batch": {"total": 8}, "train": {"steps": 1}}
    assert unipar.plan(config, strategies=["single"], worlds=[1]).notes == traced(Masked()).assumed
