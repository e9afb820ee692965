"""A fork of the process that runs the user's script: it has the libraries, and nothing of the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.world import PYTHONPATH_VARIABLE, ROOT
from unipar.launcher.processes import script_fork

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import torch, beside
from unipar.launcher.processes import script_fork
from unipar.launcher.processes.forkserver import ForkServer, ForkServerFailed
from unipar.launcher.processes.group import WorkerGroup

beside.state = "changed by the script"
torch.manual_seed(7)
torch.randn(3)
signal.signal(signal.SIGTERM, lambda *_: None)
kept = open("kept", "w")
print(repr(script_fork.why_not_fork()))
with ForkServer(["json"], {"GIVEN": "to the server"}, of_this_process=True) as server:
    with WorkerGroup(Path.cwd(), 1, "tests.support.entries:tells_what_it_has", starter=server) as workers:
        workers.wait()
    print(server.pid != os.getpid(), server.running)
torch.set_num_threads(2)
(torch.ones(700, 700) @ torch.ones(700, 700)).sum()
try:
    with ForkServer(["json"], of_this_process=True):
        pass
except ForkServerFailed as e:
    print(e)
"""


def test_a_fork_is_like_a_new_process(tmp_path: Path) -> None:
    """Modules beside the script are imported anew; `__main__`, handlers, streams and arguments are not the script's.

    Where the process has threads that end with no fork, there is none.
    """
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("state = 'as it is written'\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py", "word"],
        cwd=tmp_path,
        env={**os.environ, **PYTHONPATH_VARIABLE, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["''", "True True", "this process has threads that a fork would leave behind"]
    told: dict[str, Any] = json.loads((tmp_path / "told.json").read_text("utf-8"))
    assert told == {
        "torch": True,
        "beside": False,
        "main": [],
        "argv": ["script_fork.py"],
        "path": False,
        "sigterm": True,
        "stdin": "",
        "threads": 2,
        "fork": True,
        "seeded": False,
    }
    assert (tmp_path / "rank-0.log").read_text("utf-8") == "printed at once\n"


NO_ACCELERATOR = SimpleNamespace()
IN_USE = SimpleNamespace(is_initialized=lambda: True)


def torch_with(**changed: Any) -> Any:
    """Return what `why_not_fork` asks of torch."""
    dtype = object()
    usual: dict[str, Any] = {
        "float32": dtype,
        "get_default_dtype": lambda: dtype,
        "get_default_device": lambda: SimpleNamespace(type="cpu"),
        "is_grad_enabled": lambda: True,
        "are_deterministic_algorithms_enabled": lambda: False,
        "cpu": NO_ACCELERATOR,
        "get_device_module": lambda: NO_ACCELERATOR,
        "distributed": SimpleNamespace(is_initialized=lambda: False),
    }
    return SimpleNamespace(**(usual | changed))


@pytest.mark.parametrize(
    ("torch", "file", "why"),
    [
        (torch_with(), "train.py", ""),
        (None, "train.py", "torch is not imported"),
        (torch_with(), "", "no script of the user's is running"),
        (torch_with(), pytest.__file__, "no script of the user's is running"),
        (torch_with(get_device_module=lambda: IN_USE), "train.py", "an accelerator is in use"),
        (torch_with(distributed=IN_USE), "train.py", "a process group is in use"),
        (torch_with(is_grad_enabled=lambda: False), "train.py", "settings of torch were changed"),
        (torch_with(get_default_dtype=object), "train.py", "settings of torch were changed"),
        (torch_with(are_deterministic_algorithms_enabled=lambda: True), "train.py", "settings of torch were changed"),
    ],
)
def test_where_there_is_none(torch: Any, file: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork would have inherited what a new process has not."""
    main = ModuleType("__main__")
    if file:
        main.__file__ = file if os.path.isabs(file) else str(ROOT / "examples" / file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "multiprocessing", raising=False)
    assert script_fork.why_not_fork() == why
