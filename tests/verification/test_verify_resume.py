"""`unipar verify --resume`: strategies go on from a state that one has saved; what is lost on the way is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.verifications import verified

STRATEGIES = ("faulty/nothing", "faulty/nothing+moments-forgotten")


def test_a_state_that_is_not_loaded_whole_is_found(forks: Forks, tmp_path: Path) -> None:
    """With moments the strategy agrees from the checkpoint on; without them the first step after it is named."""
    task = "tests.support.stacked:Counting"
    done, said = verified(forks, tmp_path, task, STRATEGIES, steps=5, backend="faulty", more=["--resume"])
    rows = {row["strategy"]: row for row in said["strategies"]}
    assert [rows[strategy]["outcome"] for strategy in STRATEGIES] == ["agrees", "disagrees"]
    assert done.returncode == 1
    assert rows[STRATEGIES[0]]["losses"][:2] == said["one"]["one process"]["loss"][:2]
    assert "at step" in rows[STRATEGIES[1]]["worst"]
    assert said["remarks"][0] == (
        "every strategy goes on from the state that faulty/nothing saved after step 2, and is compared from there on "
        "with one process that was not interrupted"
    )
    assert [remark for remark in said["remarks"] if "calls" in remark] == [
        "calls in the model changed while it trained and are not in a checkpoint, which holds tensors: make them "
        "buffers, or return them in the task's state() and take them back in load_state(state)"
    ]


REAL = (
    "native/nothing",
    "native/parameters",
    "native/nothing+tensor2",
    "deepspeed/parameters",
    "horovod/nothing",
    "accelerate/parameters",
)


@pytest.mark.sweep
@pytest.mark.parametrize("strategies", [REAL[::3], REAL], ids=["two", "all"])
def test_every_library_goes_on_from_one_checkpoint(forks: Forks, tmp_path: Path, strategies: tuple[str, ...]) -> None:
    """Each loads exactly the tensors that native/nothing saved, and agrees with the uninterrupted process after."""
    task = "tests.support.stacked:Stacked"
    done, said = verified(forks, tmp_path, task, strategies, steps=4, backend="toy", more=["--resume"], tied=True)
    assert [(row["strategy"], row["outcome"]) for row in said["strategies"]] == [
        (strategy, "agrees") for strategy in strategies
    ]
    assert done.returncode == 0


def test_half_of_one_step_is_refused(forks: Forks, tmp_path: Path) -> None:
    """A state is saved after half of the steps, so there must be two."""
    (tmp_path / "c.yaml").write_text(
        "task: {use: 'tests.support.stacked:Stacked'}\ndevice: cpu\nbatch: {total: 8}\ntrain: {steps: 1}\n", "utf-8"
    )
    done = forks.unipar(["verify", str(tmp_path / "c.yaml"), "--resume"], {})
    assert done.returncode == 2
    assert done.stderr.endswith(
        "unipar: verify --resume saves after half of the steps, and there is 1; give it at least two\n"
    )
