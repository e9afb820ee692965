"""A real Jupyter kernel, which runs strategies as a notebook does."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRATEGY = """
import threading, torch, unipar
from torch import nn

scale = 1.0
pause = 0.0

class Mine(unipar.Task):
    def model(self):
        return nn.Linear(4, 1)

    def data(self):
        points = torch.linspace(-1, 1, 256).reshape(64, 4)
        return [(x, x.sum().reshape(1)) for x in points]

    def loss(self, model, batch):
        threading.Event().wait(pause)
        return scale * ((model(batch[0]) - batch[1]) ** 2).mean()

CONFIG = {
    "device": "cpu", "parallel": {"data": 2}, "batch": {"total": 8},
    "train": {"steps": 12, "optimizer": {"name": "sgd", "lr": 0.01}}, "log": {"every": 5},
}
"""


@dataclass
class Said:
    """What a strategy wrote and showed, and the error that it ended with."""

    stdout: str = ""
    stderr: str = ""
    result: str = ""
    page: str = ""
    """Result as HTML."""

    live: list[str] = field(default_factory=list[str])
    """Texts of displays, in their order."""

    displays: set[str] = field(default_factory=set[str])
    """Displays that these texts are of, each one place in the output."""

    error: str = ""
    kinds: set[str] = field(default_factory=set[str])


class Kernel:
    """Runs strategies, one after another."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def begin(self, code: str) -> str:
        return self.client.execute(code)

    def end(self, asked: str, seconds: float = 90.0) -> Said:
        said, until = Said(), time.monotonic() + seconds
        while True:
            message = self.client.get_iopub_msg(timeout=until - time.monotonic())
            if message["parent_header"].get("msg_id") != asked:
                continue
            content = message["content"]
            said.kinds.add(message["msg_type"])
            match message["msg_type"]:
                case "stream" if content["name"] == "stdout":
                    said.stdout += content["text"]
                case "stream":
                    said.stderr += content["text"]
                case "execute_result":
                    said.result = content["data"]["text/plain"]
                    said.page = content["data"].get("text/html", "")
                case "display_data" | "update_display_data":
                    said.live.append(content["data"]["text/plain"])
                    said.displays.add(content["transient"]["display_id"])
                case "error":
                    said.error = f"{content['ename']}: {content['evalue']}"
                case "status" if content["execution_state"] == "idle":
                    return said
                case _:
                    pass

    def run(self, code: str) -> Said:
        return self.end(self.begin(code))


@contextmanager
def kernel_in(folder: Path, environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Generator[Kernel]:
    """Start a kernel in this folder, with these variables besides this process's; it ends with the body."""
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"  # what it will mean some day, without a warning until then
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    private = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder)}
    manager.start_kernel(
        cwd=str(folder), env={**os.environ, **environment, **private, "OMP_NUM_THREADS": "1"}, pass_fds=[*pass_fds]
    )
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        made = Kernel(manager, client)
        assert made.run(STRATEGY).error == ""
        assert made.run(f"import os; os.chdir({str(folder)!r})").error == ""
        yield made
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
