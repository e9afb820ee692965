"""Optimizers that keep numbers of Python for each parameter: saved, put back as they were, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from tests.support.run_logs import step_losses
from tests.support.running import Line, running
from unipar.checkpoint.protocol.verifying import inspect_checkpoint
from unipar.engines.plain_state import decode_plain, describe_unsaved_value, encode_plain, plain_key
from unipar.errors import CheckpointError


class Counting(torch.optim.Optimizer):
    """Steps that become smaller by a count and a factor, which are Python's."""

    def __init__(self, params: Any, first: Callable[[], dict[str, Any]]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.first = first

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(self.first())
                state["count"] += 1
                state["factor"] *= 0.9
                state["late"] = state["count"] > 2
                p.sub_(p.grad * group["lr"] * state["factor"] / state["count"] * (2 if state["late"] else 1))


class Counted(Line):
    def __init__(self, first: Callable[[], dict[str, Any]]) -> None:
        self.first = first

    @override
    def optimizer(self, groups: Any) -> Any:
        return Counting(groups, self.first)


def play(folder: Path, steps: int, first: Callable[[], dict[str, Any]], **sections: Any) -> list[tuple[int, float]]:
    folder.mkdir()
    with running(Counted(first), folder, train={"steps": steps}, log={"every": 1}, **sections) as run:
        run.task.train(run)
    return step_losses(folder)


SHARDS = [{}, {"backend": "native", "parallel": {"data": 1, "shard": "parameters"}}]


@pytest.mark.parametrize("strategy", SHARDS)
def test_numbers_go_on(tmp_path: Path, strategy: dict[str, Any]) -> None:
    """A resumed run has the losses of the unbroken one; the checkpoint tells each number's type."""

    def first() -> dict[str, Any]:
        return {"count": 0, "factor": 1.0, "late": False, "nothing": None, "seen": torch.zeros(())}

    whole = play(tmp_path / "whole", 6, first, **strategy)
    play(tmp_path / "first", 3, first, checkpoint={}, **strategy)
    path = tmp_path / "first" / "checkpoints" / "step-00000003"
    assert play(tmp_path / "again", 6, first, resume=str(path), **strategy) == whole[3:]
    tensors = inspect_checkpoint(path).manifest.tensors
    assert {kind: (t.dtype, t.shape) for (_, kind), t in tensors.items() if kind not in ("weight", "seen")} == {
        "int count": ("I64", ()), "float factor": ("F64", ()), "bool late": ("BOOL", ()), "none nothing": ("U8", ())
    }  # fmt: skip


def test_other_values_are_refused(tmp_path: Path) -> None:
    """A list is named with its parameter at the first save."""
    with pytest.raises(CheckpointError) as caught:
        play(tmp_path / "run", 2, lambda: {"count": 0, "factor": 1.0, "history": [1]}, checkpoint={})
    assert str(caught.value) == (
        f"checkpoint of step 2 in {tmp_path}/run/checkpoints: rank 0: the optimizer keeps 'history' of weight as a "
        "list: a checkpoint holds tensors, and Python's int (of 64 bits), float, bool and None; keep it as one of "
        "these; nothing was written"
    )


@pytest.mark.parametrize("value", [3, -1, 0.1, True, False, None, float("inf")])
def test_each_number_comes_back(value: Any) -> None:
    """As the same type, with the same bits."""
    encoded = encode_plain("a key", value)
    assert encoded is not None
    kind, tensor = encoded
    assert plain_key(kind) == "a key"
    back = decode_plain(kind, tensor)
    assert (type(back), back) == (type(value), value)


def test_what_is_no_such_number() -> None:
    """Numbers that are too large, and kinds of tensors."""
    assert encode_plain("a", 2**63) is None
    assert describe_unsaved_value("a", "w", 2**63).startswith(
        "the optimizer keeps 'a' of w as the number 9223372036854775808: "
    )
    assert plain_key("exp_avg") is None
    assert plain_key("more words") is None
