"""Imports that begin as soon as `launch` is called."""

from __future__ import annotations

import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, Self

import pytest
from typing_extensions import override

import unipar
from unipar.errors import ConfigError
from unipar.launcher.processes import early


class Server:
    """Stands for a fork server, and notes what becomes of it."""

    begun: list[Server]

    def __init__(self, modules: Any, *, of_this_process: bool) -> None:
        self.said = [f"imports {' '.join(modules)}", f"of this process: {of_this_process}"]

    def __enter__(self) -> Self:
        Server.begun.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("ended")


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> Generator[list[Server]]:
    """Servers that were begun, in place of real ones."""
    Server.begun = []
    monkeypatch.setattr(early, "ForkServer", Server)
    monkeypatch.setattr(early, "count_visible_gpus", lambda: 0)
    yield Server.begun
    assert early.take_server() is None


SAID = ["imports torch torch._dynamo torch.distributed.fsdp", "of this process: False"]


def test_they_begin_once_and_end_unless_taken(begun: list[Server]) -> None:
    """Whoever takes the server ends it."""
    early.begin_imports()
    early.begin_imports()
    assert [server.said for server in begun] == [SAID]
    early.end_imports()
    assert begun[0].said == [*SAID, "ended"]
    early.end_imports()
    early.begin_imports()
    taken = early.take_server()
    early.end_imports()
    assert taken is not None
    assert begun[1].said == SAID
    taken[1].close()
    assert begun[1].said == [*SAID, "ended"]


def test_of_a_script_that_has_torch(begun: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a script is forked itself; where that cannot be, a new interpreter begins."""
    monkeypatch.setattr(early.script_fork, "why_not_fork", lambda: "")
    early.begin_imports()
    assert begun[0].said[1] == "of this process: True"
    early.end_imports()

    class Threads(Server):
        @override
        def __enter__(self) -> Self:
            if self.said[1].endswith("True"):
                raise early.ForkServerFailed("this process has threads that a fork would leave behind")
            return super().__enter__()

    monkeypatch.setattr(early, "ForkServer", Threads)
    early.begin_imports()
    assert [server.said[1] for server in begun] == ["of this process: True", "of this process: False"]
    early.end_imports()


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"])
def test_not_in_a_rank(name: str, begun: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher has started the ranks already."""
    monkeypatch.setenv(name, "0")
    early.begin_imports()
    assert begun == []


def test_not_in_a_worker_nor_with_gpus(begun: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file calls `launch` as well; and CUDA does not survive a fork."""
    with monkeypatch.context() as patch:
        patch.setattr(early, "count_visible_gpus", lambda: 1)
        early.begin_imports()
    for module, state in (
        ("unipar.task.importing", SimpleNamespace(is_importing_task=lambda: True)),
        ("unipar.launcher.worker_entries", SimpleNamespace(script_context="this worker's")),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, state)
            early.begin_imports()
    assert begun == []


def test_a_wrong_config_ends_them(begun: list[Server]) -> None:
    """Nobody needs torch then."""
    with pytest.raises(ConfigError, match="bakcend: there is no such key; did you mean 'backend'"):
        unipar.launch({"bakcend": "native"})
    assert [server.said for server in begun] == [[*SAID, "ended"]]
