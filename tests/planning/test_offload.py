"""Offloading: what stays on the device, and what lies on the host, by hand; and how a plan shows it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

import unipar
from tests.support.two_modules import MOMENTS, TIMELINE
from tests.support.world import ROOT
from unipar.backend import cells, registry
from unipar.backend.prediction.timeline import (
    Prediction,
)
from unipar.config import Cell
from unipar.config.source import load_given_config
from unipar.errors import Unsupported
from unipar.planning.peaks import predict_offloaded

STEADY = len(MOMENTS) - 1


def predict(
    cell: str, ranks: int, device: str = "cuda", precision: str = "fp32", offload: str = "none", **options: str
) -> Prediction:
    given: dict[str, Any] = {"batch": {"total": 8}, "train": {"steps": 1, "precision": precision}, "device": device}
    given |= {"parallel": {"data": ranks}, "model": {"offload": offload}, "options": {"deepspeed": options}}
    config = cells.config_in_cell(load_given_config(given).config, Cell.parse(cell))
    return registry.find_backend(config.backend).predict(config, TIMELINE, ranks, device=device)


def held(prediction: Prediction, place: Any) -> dict[str, int]:
    """Return the bytes that are in a place between two steps, by category."""
    sums: Counter[str] = Counter()
    for term in prediction.at(place):
        if term.until is None or term.until > STEADY:
            sums[term.category] += term.size
    return dict(sums)


@pytest.mark.parametrize(
    ("cell", "device", "host"),
    [
        # the optimizer's states of a half; of a master, its gradient, the parameters and the largest gradient 2**n
        (
            "deepspeed/gradients",
            {"parameters": 800_016, "communication": 600_004},
            {"masters": 2**19, "gradients": 2**19, "communication": 2**19 + 2**20, "optimizer": 800_016},
        ),
        (
            "deepspeed/parameters",  # masters are not pinned there, and gradients are there twice
            {"parameters": 400_004, "communication": 262_144},
            {"masters": 400_004, "gradients": 2**19 + 2**19, "optimizer": 800_008},
        ),
    ],
)
def test_an_optimizer_on_the_host(cell: str, device: dict[str, int], host: dict[str, int]) -> None:
    """On CUDA pinned memory is a power of two; on the CPU all of it is in the device's memory, and not rounded."""
    on_gpu, on_cpu = (predict(cell, 2, where, offload_optimizer="cpu") for where in ("cuda", "cpu"))
    assert (held(on_gpu, "device"), held(on_gpu, "host")) == (device, host)
    assert held(on_cpu, "host") == {}
    assert held(on_cpu, "device")["optimizer"] == host["optimizer"]
    assert predict(cell, 2, offload="optimizer") == on_gpu


def test_parameters_on_the_host() -> None:
    """ZeRO 3 keeps them in one tensor for each group, FSDP2 each on its own; FSDP2's gradients come in backward."""
    zero, fsdp2 = (predict(f"{name}/parameters", 2, offload="parameters") for name in ("deepspeed", "native"))
    assert held(zero, "device") == {"communication": 262_144}
    assert held(zero, "host")["parameters"] == 2**19  # 100,001 elements
    assert held(fsdp2, "device") == {}
    assert held(fsdp2, "host") == {"parameters": 2**19 + 2**17, "optimizer": 800_008}
    (fullest,) = predict_offloaded(TIMELINE, fsdp2)
    assert fullest.size == 2 * (2**19 + 2**17) + 800_008
    assert fullest.terms[0].size == 2**19
    gathered = [t for t in zero.at("device") if t.name == "partitions, from the host"]
    assert [t.size for t in gathered] == [300_004, 100_000, 300_004]


def test_one_rank_gathers_from_the_host() -> None:
    """Without others to gather from, parameters come to the device all the same."""
    names = {term.name for term in predict("deepspeed/parameters", 1, offload="parameters").at("device")}
    assert "a, gathered" in names
    assert not any("from the host" in name or "flat" in name for name in names if name.startswith(("part", "gath")))
    kept = predict("deepspeed/parameters", 1, offload_optimizer="cpu")
    assert "a, gathered" not in {term.name for term in kept.at("device")}


def test_what_goes_to_the_disk_is_refused() -> None:
    """The sentence names the key."""
    with pytest.raises(Unsupported) as e:
        predict("deepspeed/parameters", 2, offload_optimizer="disk", offload_to="/tmp")
    sentence = "options.deepspeed.offload_optimizer: disk is not planned yet; `unipar compare` measures it"
    assert list(e.value.reasons) == [sentence]


CONFIG: dict[str, Any] = {
    "task": {
        "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
        "args": {"layers": 2, "width": 16, "heads": 2, "context": 8},
    },
    "batch": {"total": 8, "micro": 2},
    "train": {"steps": 1},
    "model": {"offload": "optimizer"},
}


def test_a_row_with_offload() -> None:
    """The table has a column, JSON the largest tensors, and the explanation what lies on the host; no seconds."""
    plan = unipar.plan(CONFIG, cells=["deepspeed/parameters"], worlds=[2], machine="l4")
    (row,) = plan.rows
    states = sum(term.size for term in row.offloaded[0].terms if term.category == "optimizer")
    assert states == 8 * plan.parameters // 2
    size = row.offloaded_to("host")
    assert (size, row.offloaded_to("disk")) == (81_536, 0)
    assert "host" in plan.table(150).splitlines()[0].split()
    (as_json,) = json.loads(plan.as_json())["rows"]
    assert as_json["offloaded"]["host"]["size"] == size
    assert "on the host, beside it: 80 KiB  81,536 bytes" in plan.why("deepspeed/parameters")
    assert row.speed is None
    assert plan.notes == (
        "no seconds for deepspeed/parameters: the host updates what is offloaded to it, and a machine's file says "
        "nothing of its speed; `unipar compare` measures it",
    )
