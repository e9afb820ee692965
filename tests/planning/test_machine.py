"""Machines of a plan: presets, files, their mistakes, and which link a collective takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.config.sections.strategy import Axes
from unipar.errors import ConfigError
from unipar.planning.machines.machine import PRESETS, Link, Machine, hops, load_machine

SMALL = (
    "flops: {fp32: 2.0e+12}\nbandwidth: 100GB/s\nmemory: 4GiB\nranks: 4\nwithin: {latency: 0.001, bandwidth: 1GB/s}\n"
)


def written(folder: Path, text: str) -> str:
    (folder / "box.yaml").write_text(text, "utf-8")
    return str(folder / "box.yaml")


def test_presets() -> None:
    """Each has its numbers with their sources; links have what collectives reach of them."""
    found = load_machine("h100-sxm")
    assert (found.peak("bf16-mixed"), found.peak("fp32")) == pytest.approx((989.4e12, 66.9e12))
    assert found.within == Link(latency=8e-6, bandwidth=360e9)
    assert found.across == Link(latency=20e-6, bandwidth=320e9)  # eight adapters of 50 GB/s, 80 % of that
    assert found.source == "NVIDIA H100 Tensor Core GPU Datasheet; NVLink 4, 8 x InfiniBand NDR"
    assert load_machine("v100-32g-sxm").peak("bf16-mixed") is None
    assert {"h200-sxm", "a100-80g-sxm", "a100-40g-pcie", "l4"} <= set(PRESETS)


def test_a_file(tmp_path: Path) -> None:
    """Sizes in words; the name is the file's; a preset may be where it begins."""
    found = load_machine(written(tmp_path, SMALL))
    assert (found.name, found.memory, found.bandwidth, found.across) == ("box", 4 * 2**30, 100e9, None)
    other = load_machine(written(tmp_path, "preset: l4\nranks: 2\n"))
    assert (other.ranks, other.memory) == (2, PRESETS["l4"].memory)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("preset: l5\n", "box.yaml: preset: 'l5' is not one of b200-sxm, h200-sxm, h100-sxm"),
        ("preset: l4\nmemory: 24Gib\n", "box.yaml: memory (line 2): a size is a number and one of B, KiB, MiB, GiB, "
         "TiB, KB, MB, GB, TB; did you mean 24GiB?"),
        ("preset: l4\nrank: 2\n", "box.yaml: rank (line 2): there is no such key; did you mean 'ranks'?"),
        ("preset: l4\nflops: {bf17: 1.0}\n", "box.yaml: flops.bf17 (line 2): there is no such key; did you mean"),
        ("preset: l4\ntask: x\n", "box.yaml: task (line 2): there is no such key; such a file has name, device, "),
        ("preset: l4\nreached: 1.5\n", "box.yaml: reached (line 2): wanted a number above 0 and of at most 1"),
        ("- l4\n", "box.yaml, line 1: a machine consists of keys and values, such as `ranks: 8`"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(tmp_path: Path, text: str, sentence: str) -> None:
    """They are told with the line."""
    with pytest.raises(ConfigError) as caught:
        load_machine(written(tmp_path, text))
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(sentence)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("h100-sxn", "--machine h100-sxn: there is no such preset; did you mean h100-sxm? Presets: b200-sxm, "),
        ("zz", "--machine zz: there is no such preset; a file's name ends in .yaml. Presets: b200-sxm, "),
        ("missing.yaml", "there is no file missing.yaml"),
    ],
)
def test_machines_that_are_not_known(given: str, sentence: str) -> None:
    """The nearest name is told, and how to measure this machine."""
    with pytest.raises(ConfigError) as caught:
        load_machine(given)
    assert str(caught.value).startswith(sentence)
    assert given == "missing.yaml" or str(caught.value).endswith("`unipar plan --calibrate` measures this machine")


def test_the_link_of_a_group() -> None:
    """Groups within a machine use its links; others share the machine's adapters with the groups beside them."""
    machine = PRESETS["h100-sxm"]
    assert machine.way(Axes(), "data", 8, 8) == machine.within
    assert machine.way(Axes(), "data", 16, 16).bandwidth == 320e9  # all adapters for one ring
    assert machine.way(Axes(tensor=8), "tensor", 8, 64) == machine.within
    assert machine.way(Axes(tensor=8), "data", 8, 64).bandwidth == 40e9  # one of eight rings
    assert machine.way(Axes(tensor=2, pipeline=4), "pipeline", 4, 32).bandwidth == 40e9
    assert machine.way(Axes(tensor=4), "data", 2, 8) == machine.within
    assert machine.way(Axes(), "data", 2, 16, stride=4) == machine.within
    assert machine.way(Axes(), "data", 2, 16, stride=8).bandwidth == 40e9  # copies on two machines
    assert [hops(n) for n in (1, 2, 8, 9, 1024)] == [0, 1, 3, 4, 10]


def test_a_machine_that_stands_alone(tmp_path: Path) -> None:
    """More ranks than it has need to know how machines are connected."""
    machine = Machine.model_validate(load_machine(written(tmp_path, SMALL)).model_dump())
    assert machine.way(Axes(), "data", 4, 4).bandwidth == 1e9
    with pytest.raises(ConfigError) as caught:
        machine.way(Axes(), "data", 8, 8)
    assert str(caught.value) == (
        "the machine box has 4 ranks and nothing that connects several of them: give `across: {latency: ..., "
        "bandwidth: ...}` to plan for 8 ranks, or plan for fewer"
    )
