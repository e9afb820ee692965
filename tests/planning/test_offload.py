"""Offloading: what stays on the device, and what lies on the host, by hand; and how a plan shows it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import unipar
from tests.support.two_modules import MOMENTS, TIMELINE
from tests.support.world import ROOT
from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Strategy
from unipar.config.config_source import load_given_config
from unipar.errors import Unsupported
from unipar.planning.peaks import predict_offloaded
from unipar.prediction.timeline import Prediction, StepTimeline

STEADY = len(MOMENTS) - 1


def predict(
    strategy: str,
    ranks: int,
    device: str = "cuda",
    precision: str = "fp32",
    offload: str = "none",
    timeline: StepTimeline = TIMELINE,
    **options: str,
) -> Prediction:
    given: dict[str, Any] = {"batch": {"total": 8}, "train": {"steps": 1, "precision": precision}, "device": device}
    given |= {"parallel": {"data": ranks}, "model": {"offload": offload}, "options": {"deepspeed": options}}
    config = strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(strategy))
    return registry.find_backend(config.backend).predict(config, timeline, ranks, device=device)


def held(prediction: Prediction, place: Any) -> dict[str, int]:
    """Return the bytes that are in a place between two steps, by category."""
    sums: Counter[str] = Counter()
    for term in prediction.at(place):
        if term.until is None or term.until > STEADY:
            sums[term.category] += term.size
    return dict(sums)


@pytest.mark.parametrize(
    ("strategy", "device", "host"),
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
def test_an_optimizer_on_the_host(strategy: str, device: dict[str, int], host: dict[str, int]) -> None:
    """On CUDA pinned memory is a power of two; on the CPU all of it is in the device's memory, and not rounded."""
    on_gpu, on_cpu = (predict(strategy, 2, where, offload_optimizer="cpu") for where in ("cuda", "cpu"))
    assert (held(on_gpu, "device"), held(on_gpu, "host")) == (device, host)
    assert held(on_cpu, "host") == {}
    assert held(on_cpu, "device")["optimizer"] == host["optimizer"]
    assert predict(strategy, 2, offload="optimizer") == on_gpu


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


A, B = TIMELINE.parameters
WIDE = replace(TIMELINE, parameters=(replace(A, shape=(600_001,)), B))
"""Of two ranks each has 300,001 and 25,000 elements: 1,200,004 and 100,000 bytes."""

BOTH = {"offload_optimizer": "disk", "offload_parameters": "disk", "offload_to": "/nvme"}


def test_files_on_the_disk_and_buffers_on_the_host() -> None:
    """Files are multiples of 1,024 bytes; tensors below 1 MiB and what is left of a gradient stay in memory."""
    on_gpu, on_cpu = (predict("deepspeed/parameters", 2, where, timeline=WIDE, **BOTH) for where in ("cuda", "cpu"))
    files = {"parameters": 1_200_128, "masters": 1_300_480, "optimizer": 2_600_960, "gradients": 1_199_104}
    assert (held(on_gpu, "disk"), held(on_cpu, "disk")) == (files, files)
    buffers = 4 * 1_300_480 + 5 * 400_000_000
    assert held(on_gpu, "host") == {"parameters": 2**21, "gradients": 2**21, "communication": buffers}
    assert held(on_cpu, "device")["communication"] == buffers + 262_144  # the bucket
    kept = [t.size for t in on_gpu.at("device") if t.name.endswith("to the update")]
    assert kept == [100_000, 1_200_004]
    assert [t.first for t in on_gpu.at("device") if t.name.endswith("to the update")] == [11, 13]
    assert not [t.name for t in on_cpu.at("device") if "from the host" in t.name or "to the update" in t.name]
    assert [t.size for t in on_cpu.built] == [2_000_000_000, 2_000_000_000, 2_600_004]
    (disk,) = [outside for outside in predict_offloaded(WIDE, on_gpu) if outside.place == "disk"]
    assert disk.size == sum(files.values())


def test_gradients_wait_for_one_another() -> None:
    """All of a bucket are on a GPU until they go to the disk; those that stay on the host move one at a time."""
    for device, moved in (("disk", 100_000 + 1_200_004), ("cpu", 1_200_004)):
        to = {"offload_to": "/nvme"} if device == "disk" else {}
        found = predict(
            "deepspeed/parameters", 2, timeline=WIDE, offload_optimizer=device, offload_parameters="cpu",
            reduce="library", **to,
        )  # fmt: skip
        assert [t.size for t in found.terms if t.name == "gradients, on the device"] == [moved]


def test_one_rank_on_the_cpu_gathers_nothing() -> None:
    """Its partitions are whole."""
    found = predict("deepspeed/parameters", 1, "cpu", offload_parameters="disk", offload_to="/nvme")
    assert not [t.name for t in found.terms if "gathered" in t.name or "whole" in t.name]


def test_small_states_stay_on_the_host() -> None:
    """A sub-group below 1 MiB is not written, though its buffers are there."""
    found = predict("deepspeed/parameters", 2, offload_optimizer="disk", offload_to="/nvme")
    assert held(found, "disk") == {}
    assert held(found, "host")["masters"] == 400_004
    assert held(found, "host")["communication"] == 4 * 400_384


def test_parameters_that_the_host_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are more than DeepSpeed keeps in memory, they are read to be gathered, and a buffer is for all."""
    monkeypatch.setattr("unipar_deepspeed.prediction.swapped.IN_MEMORY", 300_000)
    found = predict("deepspeed/parameters", 2, timeline=WIDE, offload_parameters="disk", offload_to="/nvme")
    whole = 2_400_256 + 200_704  # DeepSpeed makes it for whole parameters, not for a rank's parts
    assert held(found, "host") == {"parameters": 2**21 + 2**17, "communication": 5 * 400_000_000 + whole}
    gathered = [(t.name, t.first) for t in found.terms if t.name.endswith(", gathered")]
    assert gathered == [("a, gathered", 1), ("b, gathered", 3), ("a, gathered", 5)]  # when called; from memory 0, 3, 3
    low = predict("deepspeed/parameters", 2, "cuda", "bf16-master", timeline=WIDE, offload_parameters="disk")
    assert [t.size for t in low.terms if t.name == "group 0, updated parameters"] == [300_001 * 4]


def refused(timeline: StepTimeline, **options: str) -> str:
    with pytest.raises(Unsupported) as e:
        predict("deepspeed/parameters", 2, timeline=timeline, **BOTH, **options)
    (reason,) = e.value.reasons
    return reason


def test_what_deepspeed_cannot_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sentence has the numbers and the way out."""
    three = replace(TIMELINE, parameters=(replace(A, states=(4, 4, 4)), B))
    assert refused(three) == (
        "options.deepspeed.offload_optimizer: disk: DeepSpeed has 4 buffers for a master, its gradient and the "
        "optimizer's states, and this optimizer has 3 states; say cpu"
    )
    large = replace(TIMELINE, parameters=(replace(A, shape=(200_000_002,)), B))
    assert refused(large) == (
        "options.deepspeed.offload_parameters: disk: a rank's part of a has 100,000,001 elements, and DeepSpeed's "
        "buffers 100,000,000; take more ranks, or say cpu"
    )
    monkeypatch.setattr("unipar_deepspeed.prediction.swapped.IN_MEMORY", 0)
    monkeypatch.setattr("unipar_deepspeed.prediction.swapped.SWAPPED_BYTES", 350_000)
    last = replace(TIMELINE, parameters=(A, replace(B, shape=(200_000,))))  # used by forward and then by backward
    assert refused(last) == (
        "options.deepspeed.offload_parameters: disk: b is used twice within what DeepSpeed reads ahead, where it ends "
        "with an error; say cpu"
    )
    monkeypatch.setattr("unipar_deepspeed.prediction.swapped.SWAPPED_BYTES", 1024)
    monkeypatch.setattr("unipar_deepspeed.prediction.swapped.PARAMETER_BUFFERS", 1)
    assert refused(TIMELINE, reuse="library") == (
        "options.deepspeed.offload_parameters: disk: DeepSpeed has 1 buffers, and 2 parameters that are read from the "
        "disk are whole at once, where it ends with an error; lower options.deepspeed.prefetch and reuse, or say cpu"
    )


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
    plan = unipar.plan(CONFIG, strategies=["deepspeed/parameters"], worlds=[2], machine="l4")
    (row,) = plan.rows
    states = sum(term.size for term in row.offloaded[0].terms if term.category == "optimizer")
    assert states == 8 * plan.parameters // 2
    size = row.offloaded_to("host")
    assert (size, row.offloaded_to("disk")) == (81_536, 0)
    assert "host" in plan.table(150).split("\n\n")[1].splitlines()[0].split()
    (as_json,) = json.loads(plan.as_json())["rows"]
    assert as_json["offloaded"]["host"]["size"] == size
    assert "on the host, beside it: 80 KiB  81,536 bytes" in plan.why("deepspeed/parameters")
    assert row.speed is None
    assert plan.notes == (
        "no seconds for deepspeed/parameters: the host updates what is offloaded to it, and a machine's file says "
        "nothing of its speed; `unipar compare` measures it",
    )


def test_a_row_with_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column has their bytes; that libaio is not here is no reason against a plan for GPUs that are not here."""
    monkeypatch.setattr("unipar_deepspeed.options._has_libaio", lambda: False)
    monkeypatch.setattr("unipar_deepspeed.options.count_visible_gpus", lambda: 0)
    options = {"deepspeed": {"offload_optimizer": "disk", "offload_to": "/nvme"}}
    wide = {**CONFIG["task"], "args": {**CONFIG["task"]["args"], "width": 256}}
    given = CONFIG | {"task": wide, "model": {}, "options": options}
    plan = unipar.plan(given, strategies=["deepspeed/parameters"], worlds=[2], device="cuda")
    (row,) = plan.rows
    assert (row.refusal, row.offloaded_to("disk")) == ("", 9_627_648)
    table = plan.table(160)
    header = table.split("\n\n")[1].splitlines()[0].split()
    assert header[header.index("host") + 1] == "disk"
    assert "disk: bytes of the files in which a rank keeps what is offloaded; 'fits' does not count them" in table
    (as_json,) = json.loads(plan.as_json())["rows"]
    assert as_json["offloaded"]["disk"]["size"] == row.offloaded_to("disk")
    assert "on the disk, beside it: " in plan.why("deepspeed/parameters")
