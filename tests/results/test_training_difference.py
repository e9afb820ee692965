"""What changed between two trainings of which one was observed: equal, differs, unequal; never which one is right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.comparisons import PARAMETER_COUNT, account, write_example_comparison
from tests.support.observations import LOSSES, SAME_DROPOUT, UNEQUAL, observed_rank, write_observation
from tests.support.run_folders import plain
from unipar.errors import ReportError
from unipar.results.training_difference import TrainingDifference, digits_text
from unipar.results.training_summary import numbers_among, read_training


def difference(before: Path, after: Path) -> TrainingDifference:
    return TrainingDifference(read_training(before), read_training(after))


def test_two_observed_commands_that_are_equal(tmp_path: Path) -> None:
    """All facts are equal, and so are losses and norms to the bit."""
    found = difference(write_observation(tmp_path / "a"), write_observation(tmp_path / "b"))
    assert {row.verdict for row in (*found.setup, *found.times, *found.sent)} == {"equal"}
    assert {row.verdict for _, row in found.categories} == {"equal"}
    assert found.agreements == [
        "losses of 10 steps: equal, same bits",
        "norms before the clip of 10 steps: equal, same bits",
        "norms in the optimizer of 2 steps: equal, same bits",
    ]
    assert found.findings == []
    assert found.headline() == (
        "Peak 178 MiB to 178 MiB (equal); a step 210 ms to 210 ms (equal); losses of 10 steps equal, same bits"
    )


TEXT = """\
before: a (observed: DDP, 2 ranks)
after: b (observed: DDP, 4 ranks)

                        before  after
ranks                   2       4       differs
optimizer               AdamW   SGD     differs
clip                    1       none    differs
weight_decay            0.1     0       differs
rate at step 1          0.0003  0.0001  differs
a step                  210 ms  420 ms  +100.0 %
data                    1.0 ms  100 ms  x 100
forward                 50 ms   50 ms   equal
backward                110 ms  220 ms  +100.0 %
update                  30 ms   30 ms   equal
between                 19 ms   19 ms   equal
waits                   5.0%    5.0%    equal
all_reduce (all ranks)  34 MiB  34 MiB  equal
sent in all             34 MiB  34 MiB  equal
equal: strategy, device, steps, model, parameters, dtypes, called by, backwards
  a step, batch, exit code, lr

MiB               peak  param  grad  optim  comm  activ  temp  rest  ?  change
built     before   107     20    20     41    20      -   2.9   1.5  -
          after    160     31    31     61    31      -   4.4   2.2  -  +50.0 %
forward   before   142     27    27     54    27      -   3.9   2.0  -
          after    213     41    41     82    41      -   5.8   2.9  -  +50.0 %
backward  before   165     32    32     63    32      -   4.5   2.3  -
          after    248     48    48     95    48      -   6.8   3.4  -  +50.0 %
update    before   178     34    34     68    34      -   4.9   2.5  -
          after    266     51    51    102    51      -   7.3   3.7  -  +50.0 %
steady    before   133     26    26     51    26      -   3.6   1.8  -
          after    200     38    38     77    38      -   5.5   2.8  -  +50.0 %

step  loss before  after  equal to  norm before  after  equal to
   1          4.5  4.501  3 digits        1.875  1.875       all
   2         4.25  4.251  3 digits         1.75   1.75       all
   3        4.125  4.126  3 digits        1.625  1.625       all
"""


def test_the_text_of_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ with their change, names of those that are equal, memory by phase, first steps, findings."""
    monkeypatch.chdir(tmp_path)
    write_observation(Path("a"), findings=(UNEQUAL,))
    changed = {
        "size": 4,
        "optimizers": ("SGD",),
        "clip": None,
        "settings": {"lr": 0.0003, "weight_decay": 0.0},
        "rates": dict.fromkeys(range(1, 11), (0.0001,)),
        "seconds": 0.42,
        "phases": {"data": 0.1, "forward": 0.05, "backward": 0.22, "update": 0.03, "between": 0.019},
    }
    ranks = [observed_rank(rank, **changed) for rank in range(2)]
    write_observation(Path("b"), ranks, findings=(SAME_DROPOUT,), memory=1.5, loss=0.001)
    found = difference(Path("a"), Path("b"))
    text = found.table(80)
    assert text.startswith(TEXT)
    assert text.endswith("""\
losses of 10 steps: equal to 3 digits, furthest apart at step 10: 3.25 and 3.251
norms before the clip of 10 steps: equal, same bits
norms in the optimizer of 2 steps: equal, same bits
loss of an observed command: the mean of its ranks' losses

new note, same dropout, step 2: dropout drops the same places on all ranks.
gone fault, unequal copies, step 8: after step 8 1 of 54 weights differ between
  the ranks: blocks.0.attention.query.weight on rank 1. Way out: wrap the model
  before training, and change no weight on one rank alone.""")
    assert [state for state, _ in found.findings] == ["new", "gone"]
    assert max(map(len, text.splitlines())) <= 80
    assert found.headline() == (
        "Peak 178 MiB to 266 MiB (+50.0 %); a step 210 ms to 420 ms (+100.0 %); losses of 10 steps equal to 3 digits; "
        "1 new; 1 gone finding; ranks, optimizer, clip, weight_decay, rate at step 1 differ"
    )


def test_the_loss_of_an_observed_command_is_the_mean_of_its_ranks(tmp_path: Path) -> None:
    """Each rank has the loss of its own batch; a unipar run logs that of the global batch."""
    other = tuple(loss + 0.5 for loss in LOSSES)
    folder = write_observation(tmp_path / "a", [observed_rank(0), observed_rank(1, losses=other)])
    assert read_training(folder).losses == {step: loss + 0.25 for step, loss in enumerate(LOSSES, 1)}


def test_an_observed_command_and_a_run(tmp_path: Path) -> None:
    """What both have is compared: losses, norms, rates, settings, memory; names of optimizers in any case."""
    run = plain(tmp_path / "run")
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["train"] |= {
        "optimizer": {"name": "adamw", "lr": 0.0003, "betas": [0.9, 0.95]},
        "clip": {"max": 1.0},
        "precision": "fp32",
    }
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    account("native/nothing", 0).write(run)
    found = difference(write_observation(tmp_path / "a"), run)
    assert {row.what: row.verdict for row in found.setup} == {
        "ranks": "equal",
        "steps": "equal",
        "parameters": "equal",
        "dtypes": "equal",
        "optimizer": "equal",
        "clip": "equal",
        "lr": "equal",
        "rate at step 1": "differs",
    }
    assert [(row.what, row.after) for row in found.times] == [
        ("a step", "200 ms"),
    ]
    assert {row.verdict for _, row in found.categories} == {"equal"}
    assert [(row.step, row.losses, row.norms) for row in found.steps] == [
        (1, (4.5, 4.5), (1.875, 2.0)),
        (10, (3.25, 3.25), (None, None)),
    ]
    assert found.agreements[0] == "losses of 2 steps: equal, same bits"
    assert found.findings == []


def test_an_observed_command_and_a_strategy_of_a_comparison(tmp_path: Path) -> None:
    """Its folder is given; the comparison as a whole is refused, with the folders to choose from."""
    seen = write_observation(tmp_path / "a")
    compared = write_example_comparison(tmp_path / "run")
    found = difference(seen, compared / "compare/native-nothing")
    assert found.after.facts["strategy"] == "native/nothing"
    assert {row.verdict for _, row in found.categories} == {"equal"}
    assert {row.what: row.verdict for row in found.times} == {"a step": "+150.5 %"}
    assert found.agreements == [
        "losses of 10 steps: unequal, furthest apart at step 1: 4.5 and 5.7",
    ]
    with pytest.raises(ReportError) as e:
        read_training(compared)
    assert str(e.value).startswith(
        f"{compared} holds a comparison of several strategies, and an observed command is compared with one: give its "
        f"folder, such as {compared}/compare/single, {compared}/compare/native-nothing, "
    )
    (compared / "compare/other").mkdir()
    with pytest.raises(
        ReportError, match=r"other is not a strategy of .*compare.json that can be compared: it is not in"
    ):
        read_training(compared / "compare/other")
    (tmp_path / "v").mkdir()
    (tmp_path / "v/verify.json").write_text("{}", "utf-8")
    with pytest.raises(ReportError, match="holds a verification: an observed command is compared with another one"):
        read_training(tmp_path / "v")


def test_memory_in_one_of_both_is_not_compared(tmp_path: Path) -> None:
    """Nor are bytes sent; a category that only one has is named."""
    one, two = write_observation(tmp_path / "a", memory=None), write_observation(tmp_path / "b")
    assert difference(one, two).phases == []
    assert difference(one, two).sent == []
    whole = account("native/nothing", 0)
    phases = [p.model_copy(update={"held": {**p.held, "averages": 2**20}}) for p in whole.phases]
    whole.model_copy(update={"phases": tuple(phases), "sent_along": {"tensor": {"all_gather": 2**20}}}).write(one)
    found = difference(one, two)
    assert ("averages", "only before") in [(row.what, row.verdict) for _, row in found.categories]
    assert [(row.what, row.before, row.after, row.verdict) for row in found.sent] == [
        ("all_gather (tensor)", "1.0 MiB", "-", "only before"),
        ("all_reduce (all ranks)", "-", "34 MiB", "only after"),
        ("sent in all", "1.0 MiB", "34 MiB", "x 34.1"),
    ]


def test_values_that_are_not_finite_are_not_compared(tmp_path: Path) -> None:
    """Only steps in which both are finite count."""
    rank = observed_rank(0, losses=(4.5, math.nan, 4.125), norms={1: math.inf, 2: 1.75})
    found = difference(write_observation(tmp_path / "a", [rank]), write_observation(tmp_path / "b"))
    assert found.agreements[:2] == [
        "losses of 2 steps: equal, same bits",
        "norms before the clip of 1 step: equal, same bits",
    ]


def test_digits() -> None:
    """All, some, none; None if one of both is not known."""
    assert [digits_text(*pair) for pair in ((1.0, 1.0), (1.0, 1.0005), (1.0, 1.05), (1.0, 2.5), (1.0, None))] == [
        "all",
        "3 digits",
        "1 digit",
        "none",
        None,
    ]


def test_numbers_among_settings() -> None:
    """Pairs count one by one, yes and no not at all."""
    assert numbers_among({"lr": 1, "betas": [0.9, 0.95], "fused": True, "name": "adamw", "decay": None}) == {
        "lr": 1.0,
        "betas[0]": 0.9,
        "betas[1]": 0.95,
    }


def test_the_parameters_of_the_example() -> None:
    """The hand-made folders hold the same model, so that differences are those that a test makes."""
    assert observed_rank().parameters == PARAMETER_COUNT
