"""`unipar plan`: strategies on numbers of ranks, a limit, and refusals; as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.short_text import short_text
from unipar.backend.offered_strategies import strategy_of
from unipar.cli.commands.config.plan import read_device, read_ranks, read_share, read_size
from unipar.comparison.pick import write_picked_config
from unipar.config import BatchSizes
from unipar.config.config_source import load_config_file, load_given_config
from unipar.errors import ConfigError, OutExists
from unipar.planning.explanation import group_terms

CONFIG: dict[str, Any] = {
    "task": short_text(),
    "device": "cpu",
    "batch": {"total": 8, "micro": 2},
    "train": {"steps": 1},
}


@pytest.fixture(scope="module")
def planned() -> Any:
    return unipar.plan(
        CONFIG,
        strategies=["single", "native/*", "deepspeed/gradients"],
        worlds=[1, 2, 3],
        memory=200_000,
        headroom=0.01,
    )


def test_each_strategy_on_each_number_of_ranks(planned: Any) -> None:
    """One process is planned once; a world that does not divide the batch is told, and the others are planned."""
    rows = {(row.strategy, row.ranks): row for row in planned.rows}
    assert [ranks for strategy, ranks in rows if strategy == "single"] == [1]
    assert [ranks for strategy, ranks in rows if strategy == "native/parameters"] == [1, 2, 3]
    assert rows["native/nothing", 3].refusal == (
        "batch.total (8) is not a multiple of micro x data (2 x 3 = 6); the nearest totals are 6 and 12"
    )
    states = {ranks: rows["deepspeed/gradients", ranks].phases[-1].held["optimizer"] for ranks in (1, 2)}
    assert states == {1: 65_024, 2: 32_512}
    assert rows["native/nothing", 2].micro == 2
    held = rows["native/nothing", 2].phases[-1].held
    assert held["optimizer"] == 2 * held["parameters"] == 2 * held["gradients"]
    assert rows["native/parameters", 2].phases[-1].held["optimizer"] < 0.6 * held["optimizer"]


def test_the_largest_microbatch_that_fits(planned: Any) -> None:
    """Of those that divide a rank's share of the batch, which stays."""
    assert planned.limit == 198_000
    rows = {(row.strategy, row.ranks): row for row in planned.rows if not row.refusal}
    one, two = rows["native/nothing", 1], rows["native/gradients", 2]
    assert (one.largest, two.largest) == (1, 2)
    assert one.needed > 198_000 > two.needed
    assert (one.late, two.late > 0) == (0, True)  # gloo may free what it sent after the training has gone on
    more = unipar.plan(CONFIG, strategies=["native/nothing"], worlds=[1], memory=200_000 + one.peak.peak)
    assert more.rows[0].largest == 8


def test_tables_of_two_widths(planned: Any) -> None:
    """What to take, categories, whether it fits, and what the numbers are; a narrow table has fewer columns."""
    answer, table, notes = (part.splitlines() for part in planned.table(150).split("\n\n"))
    assert answer[0].startswith("take, on 1 rank: ")
    assert table[0].split() == [
        *("strategy", "ranks", "micro", "peak", "in", "param", "grad", "optim", "comm", "activ", "temp", "sent"),
        *("fits", "largest", "micro"),
    ]
    assert any(line.startswith("native/gradients") and " yes " in line for line in table)
    assert "parameters; planned in" in notes[0]
    assert notes[-1].startswith("fits: at most 195 KiB less 1%; largest micro:")
    narrow = planned.table(80).split("\n\n")[1].splitlines()
    assert narrow[0].split() == ["strategy", "ranks", "micro", "peak", "sent", "fits", "largest", "micro"]
    assert all(len(line) <= 80 for line in narrow)
    assert [row.ways for row in planned.rows if row.strategy == "native/nothing" and row.ranks == 1] == [
        ("micro 1 fits",)
    ]


def test_as_json(planned: Any) -> None:
    """All phases, each with its largest terms by name."""
    rows = json.loads(planned.as_json())["rows"]
    (row,) = (row for row in rows if (row["strategy"], row["ranks"]) == ("native/parameters", 2))
    assert [phase["phase"] for phase in row["phases"]] == ["built", "forward", "backward", "update", "steady"]
    assert all(sum(phase["held"].values()) == phase["peak"] for phase in row["phases"])
    assert row["phases"][1]["largest"][0]["category"] in ("activations", "communication")
    assert row["phases"][0]["largest"][0]["name"] == "whole model, of rank 0"


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("700B", 700)]
)
def test_sizes(text: str, size: int) -> None:
    """Powers of two and of ten."""
    assert read_size(text) == size


UNITS = "one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("80Gib", f"a number and {UNITS}; did you mean 80GiB?"),
        ("80", f"a number and {UNITS}; did you mean 80GiB or 80GB?"),
        ("512m", f"a number and {UNITS}; did you mean 512MiB or 512MB?"),
        ("3 apples", f"a number and {UNITS}: 80GiB"),
        ("GiB", f"a positive number and {UNITS}: 80GiB"),
        ("-1GiB", f"a positive number and {UNITS}: 80GiB"),
        ("80 GiB x", f"a positive number and {UNITS}: 80GiB"),
        ("0GiB", "positive: 80GiB"),
    ],
)
def test_sizes_that_are_none(text: str, sentence: str) -> None:
    """They are refused with what was perhaps meant, or an example."""
    with pytest.raises(ConfigError) as caught:
        read_size(text)
    assert str(caught.value) == f"--memory {text}: a size is {sentence}"


def test_shares_and_ranks() -> None:
    """In per cent or as a fraction; whole numbers."""
    assert (read_share("5%"), read_share("0.1"), read_share("0%"), read_ranks("64")) == (0.05, 0.1, 0.0, 64)
    with pytest.raises(ConfigError) as share:
        read_share("120%")
    assert str(share.value) == "--headroom 120%: a share is from 0% to less than 100%: 5%, or 0.05"
    with pytest.raises(ConfigError) as ranks:
        read_ranks("0")
    assert str(ranks.value) == "--world: '0' is no number of ranks; say for example --world 1,8,64"


def test_devices() -> None:
    """A GPU is cuda here."""
    assert (read_device("cpu"), read_device("cuda")) == ("cpu", "cuda")
    for text, meant in (("gpu", "cuda"), ("cdua", "cuda"), ("CPU", "cpu")):
        with pytest.raises(ConfigError) as caught:
            read_device(text)
        assert str(caught.value) == f"--device {text}: plan for cpu or cuda; did you mean {meant!r}?"


@pytest.fixture(scope="module")
def fast() -> Any:
    return unipar.plan(CONFIG, strategies=["single", "native/*"], worlds=[1, 2, 16], machine="l4")


def test_seconds_on_a_machine(fast: Any) -> None:
    """Counted operations at what an L4 reaches, for 43 % of 30.3 TFLOP/s; memory and the device are the machine's."""
    rows = {(row.strategy, row.ranks): row for row in fast.rows}
    assert (fast.device, fast.memory, fast.machine, fast.units) == ("cuda", 23034 * 2**20, "l4", "samples")
    one, two = rows["single", 1].speed, rows["native/nothing", 2].speed
    assert one.communication == 0.0
    assert one.rate == pytest.approx(8 / one.seconds)
    assert 0.0 < one.mfu < 0.43
    assert two.communication == two.hidden > 0.0  # DDP sends while the backward goes on
    assert rows["native/nothing", 2].sent_bytes == fast.parameters * 4
    assert "step" in fast.table(120).split("\n\n")[1].splitlines()[0].split()
    assert any(
        line.startswith("take, on 1 rank: single with micro 2: it fits (") for line in fast.table(200).splitlines()
    )


def test_what_a_process_on_cuda_holds_besides(fast: Any) -> None:
    """CUDA's context in every process, NCCL where there are several: terms of their own, counted in what fits."""
    rows = {(row.strategy, row.ranks): row for row in fast.rows if not row.refusal}
    assert rows["single", 1].peak.held["runtime"] == 500 * 2**20
    assert rows["native/nothing", 2].peak.held["runtime"] == 700 * 2**20
    assert "runtime" in fast.table(200).split("\n\n")[1].splitlines()[0].split()
    assert "batch.total (8) is not a multiple of" in next(row.refusal for row in fast.rows if row.ranks == 16)


def test_fp16_needs_what_bf16_mixed_needs() -> None:
    """Gradients are divided by the loss scale in place; on the CPU it cannot run."""
    strategies = ["native/nothing", "native/parameters", "deepspeed/gradients"]
    given = [CONFIG | {"train": {"steps": 1, "precision": precision}} for precision in ("fp16", "bf16-mixed")]
    low, mixed = (unipar.plan(config, strategies=strategies, worlds=[2], machine="l4").rows for config in given)
    assert [row.refusal for row in low] == ["", "", ""]
    assert [(row.peak.held, row.sent) for row in low] == [(row.peak.held, row.sent) for row in mixed]
    (refused,) = unipar.plan(given[0], strategies=["native/nothing"], worlds=[2]).rows
    assert refused.refusal == (
        "native/nothing: train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"
    )


def test_fp8_keeps_no_copies_of_weights() -> None:
    """bf16-mixed does, of 2 bytes each, from forward to backward; how fast products are is not known."""
    given = [CONFIG | {"train": {"steps": 1, "precision": precision}} for precision in ("fp8", "bf16-mixed")]
    low, mixed = (
        unipar.plan(config, strategies=["native/nothing"], worlds=[2], machine="h100-sxm") for config in given
    )
    kept = [plan.rows[0].phases[0].held["activations"] for plan in (low, mixed)]
    matrices = 2 * (3 + 1 + 4 + 4) * 16 * 16
    assert kept[1] - kept[0] == 2 * matrices
    assert "matrix products are planned at the speed of bf16: by how much fp8 is faster is not known" in low.notes


def test_why_a_peak_is_as_high(planned: Any) -> None:
    """Its terms by category and block add up to it; each tensor is named if it is asked for."""
    row = next(row for row in planned.rows if (row.strategy, row.ranks) == ("native/parameters", 2))
    groups = group_terms(row.peak, planned.blocks)
    assert sum(group.size for each in groups.values() for group in each) == row.peak.peak
    assert {category: sum(group.size for group in each) for category, each in groups.items()} == {
        category: size for category, size in row.peak.held.items() if size
    }
    assert [group.block for group in groups["parameters"]] == ["layers.0", "layers.1", "outside the blocks"]
    short, long = (planned.why("native/parameters", 2, every=every) for every in (False, True))
    assert short.splitlines()[0].startswith("native/parameters on 2 ranks, micro 2: ")
    assert f"100%  {row.peak.peak:,} bytes" in short
    assert "every tensor: --all" in short
    assert "layers.1.mlp.0.weight 2" in long


@pytest.mark.parametrize(
    ("strategy", "ranks", "sentence"),
    [
        ("native/paramters", 2, "why native/paramters: the plan has no such row on 2 ranks; did you mean "
         "native/parameters? It has single, native/nothing,"),
        ("native/nothing", None, "why native/nothing: it is planned on 1, 2, 3 ranks; name one of them (--world 3)"),
    ],
)  # fmt: skip
def test_why_of_no_row(planned: Any, strategy: str, ranks: int | None, sentence: str) -> None:
    """Names what there is."""
    with pytest.raises(ConfigError) as caught:
        planned.why(strategy, ranks)
    assert str(caught.value).startswith(sentence)


def test_what_would_have_to_change() -> None:
    """Where no microbatch fits: bytes that lack, what splits more, and more ranks."""
    found = unipar.plan(
        CONFIG, strategies=["single", "native/nothing", "native/gradients"], worlds=[1, 2], memory="128KiB", headroom=0
    )
    assert {(row.strategy, row.ranks): row.ways for row in found.rows} == {
        ("single", 1): ("needs 29 KiB more, whatever the micro",),
        ("native/nothing", 1): ("needs 61 KiB more, whatever the micro",),
        ("native/nothing", 2): ("needs 76 KiB more, whatever the micro",),
        ("native/gradients", 1): ("needs 62 KiB more, whatever the micro", "fits on 4 ranks"),
        ("native/gradients", 2): ("needs 46 KiB more, whatever the micro", "fits on 4 ranks"),
    }
    lines = found.table(200).splitlines()
    assert "native/gradients on 2: needs 46 KiB more, whatever the micro; fits on 4 ranks" in lines
    assert any(line.startswith("take, on 2 ranks: nothing fits; native/gradients comes nearest") for line in lines)


TEXT = f"""# my run
task: {{use: {CONFIG["task"]["use"]}, args: {{layers: 2, width: 16, heads: 2, context: 8}}}}
device: cpu
batch: {{total: 8, micro: 2}}   # of samples
train: {{steps: 1}}
"""


def only(planned: Any, strategy: str, *numbers: int, **changes: Any) -> Any:
    """Return the plan with these rows alone, and no limit."""
    rows = tuple(row for row in planned.rows if row.strategy == strategy and row.ranks in numbers)
    return replace(planned, rows=rows, **{"memory": None, **changes})


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ("native/parameters", TEXT),
        ("native/optimizer", TEXT + "backend: deepspeed # who\nparallel:\n  data: 1\n"),
        ("native/gradients", TEXT.replace("micro: 2", "accumulate: 1")),
    ],
)
def test_the_recommended_config_as_a_file(planned: Any, tmp_path: Path, strategy: str, text: str) -> None:
    """The user's text in that strategy, comments and all, and loads; it replaces nothing without being told."""
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    out, source = tmp_path / "picked.yaml", load_config_file(tmp_path / "mine.yaml")
    write_picked_config(only(planned, strategy, 2), source, out)
    made = load_config_file(out).config
    assert str(strategy_of(made)) == strategy
    assert made.parallel.data == 2
    assert made.batch.settle(2) == BatchSizes(total=8, micro=2, accumulate=2, ranks=2)
    assert out.read_text("utf-8").startswith("# my run\ntask: {")
    assert "# of samples" in out.read_text("utf-8")
    with pytest.raises(OutExists) as caught:
        write_picked_config(only(planned, strategy, 2), source, out)
    assert str(caught.value) == f"--pick {out}: it already exists; name another file, or write over it (--overwrite)"
    write_picked_config(only(planned, strategy, 2), source, out, overwrite=True)


def test_options_of_a_variant(planned: Any, tmp_path: Path) -> None:
    """They are set where the strategy needs them, and have their default where it does not."""
    (tmp_path / "mine.yaml").write_text(TEXT + "options: {native: {wrapper: dp}}\n", "utf-8")
    source = load_config_file(tmp_path / "mine.yaml")
    library = only(planned, "native/gradients", 2)
    library = replace(library, rows=(replace(library.rows[0], strategy="deepspeed/gradients+library"),))
    write_picked_config(library, source, tmp_path / "library.yaml")
    assert str(strategy_of(load_config_file(tmp_path / "library.yaml").config)) == "deepspeed/gradients+library"
    write_picked_config(only(planned, "native/nothing", 2), source, tmp_path / "plain.yaml")
    assert str(strategy_of(load_config_file(tmp_path / "plain.yaml").config)) == "native/nothing"


def test_a_config_in_another_folder(planned: Any, tmp_path: Path) -> None:
    """Its task is found from there; what --set gave is in the file."""
    (tmp_path / "task.py").write_text("", "utf-8")
    (tmp_path / "mine.yaml").write_text(TEXT.replace(CONFIG["task"]["use"], "task.py:Mine"), "utf-8")
    (tmp_path / "there").mkdir()
    out = tmp_path / "there" / "picked.yaml"
    source = load_config_file(tmp_path / "mine.yaml", ["train.seed=3"])
    write_picked_config(only(planned, "native/parameters", 2), source, out)
    assert 'use: "../task.py:Mine"' in out.read_text("utf-8")
    made = load_config_file(out).config
    assert (made.task, made.train.seed) == (source.config.task, 3)


@pytest.mark.parametrize(
    ("numbers", "changes", "sentence"),
    [
        ((1, 2), {}, "--pick writes one config, and the plan is for 1, 2 ranks: name one (--world N)"),
        ((2,), {"exclude": ("native/nothing",)}, "--pick: on 2 ranks no strategy can be planned here"),
        ((2,), {}, "--pick changes a config's file, and this config was not read from one: write it to a file"),
    ],
)
def test_what_cannot_be_picked(
    planned: Any, tmp_path: Path, numbers: tuple[int, ...], changes: dict[str, Any], sentence: str
) -> None:
    """Several recommendations, none, and a config that is no file."""
    with pytest.raises(ConfigError) as caught:
        write_picked_config(
            only(planned, "native/nothing", *numbers, **changes), load_given_config(CONFIG), tmp_path / "picked.yaml"
        )
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"machine": "l4", "device": "cpu"}, "device cpu: the machine l4 has cuda; leave one of them out"),
        ({"memory": "80Gib"}, "memory 80Gib: a size is a number and one of"),
        ({"memory": -1}, "memory -1: a size is positive: 80GiB"),
        ({"headroom": 1.5}, "headroom 1.5: a share is from 0 to less than 1: 0.05"),
    ],
)
def test_arguments_that_are_refused(more: dict[str, Any], sentence: str) -> None:
    """With the way out."""
    with pytest.raises(ConfigError) as caught:
        unipar.plan(CONFIG, strategies=["native/nothing"], **more)
    assert str(caught.value).startswith(sentence)
