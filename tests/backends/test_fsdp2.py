"""FSDP2's own records of what it keeps, which torch 2.11 and later torches lay out differently."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import Line, running
from unipar.engines.fsdp2_sharded import fsdp_groups, reduce_scatter_states


def test_groups_of_the_installed_torch(tmp_path: Path) -> None:
    """A model without blocks is one group, which holds its one parameter; after a step no reduction is kept."""
    with running(Line(), tmp_path, backend="native", parallel={"shard": "parameters"}) as run:
        engine: Any = run.engine
        [group] = fsdp_groups(engine.wrapped._get_fsdp_state())
        assert len(group.fsdp_params) == 1
        run.step(next(run.batches()))
        assert list(reduce_scatter_states(engine.wrapped._get_fsdp_state()._comm_ctx)) == []


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (SimpleNamespace(_fsdp_param_group=None), []),
        (SimpleNamespace(_fsdp_param_group="one"), ["one"]),
        (SimpleNamespace(_fsdp_param_group="one", _fsdp_param_groups=["one", "two"]), ["one", "two"]),
    ],
)
def test_groups_of_either_layout(state: Any, groups: list[str]) -> None:
    """One or None in torch 2.11, a list since 2.12."""
    assert list(fsdp_groups(state)) == groups


@pytest.mark.parametrize(
    ("context", "kept"),
    [
        (SimpleNamespace(), []),
        (SimpleNamespace(reduce_scatter_state=None), []),
        (SimpleNamespace(reduce_scatter_state="input"), ["input"]),
        (SimpleNamespace(reduce_scatter_states=["input", "next"]), ["input", "next"]),
    ],
)
def test_reductions_of_either_layout(context: Any, kept: list[str]) -> None:
    """Neither before the first forward; one or None in torch 2.11, a list since 2.12."""
    assert list(reduce_scatter_states(context)) == kept
