"""A rank of a world in which several scripts run one after the other, each in a fork: `SCRIPT JOBS`."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed

ALWAYS = ("torch._dynamo", "torch.distributed.tensor", "unipar.observing.process.observer")
"""What each script or its observer imports in the end, which takes seconds."""

LIBRARIES = ("accelerate", "deepspeed", "lightning.fabric", "torch.distributed.fsdp", "transformers", "peft")
SECONDS = 60.0
"""Time that a script may take."""


def main() -> None:
    """Run all jobs, each in a fork."""
    jobs: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    texts = [Path(job["script"]).read_text("utf-8") for job in jobs]
    for module in ALWAYS:
        importlib.import_module(module)
    for library in LIBRARIES:
        if any(re.search(rf"^(from|import) {library}\b", text, re.MULTILINE) for text in texts):
            importlib.import_module(library)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torchruns = distributed.TCPStore(host, port, is_master=False)
    stores = open_stores(host, len(jobs)) if os.environ["RANK"] == "0" else []
    if stores:
        torchruns.set("ports", " ".join(str(store.port) for store in stores))
    for job, port in zip(jobs, torchruns.get("ports").decode().split(), strict=True):
        if not (pid := os.fork()):
            run(job, port)
        wait(pid, job)
    torchruns.set(f"done {os.environ['RANK']}", "")
    torchruns.wait([f"done {rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])  # rank 0 keeps the stores open


def open_stores(host: str, count: int) -> list[distributed.TCPStore]:
    """Return stores in which the ranks of each script meet."""
    return [distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False) for _ in range(count)]


def run(job: dict[str, Any], port: str) -> NoReturn:
    """Run a script as `torchrun` would start it in a world of its own, and end with its exit code.

    What its names stand for is never freed: torch would wait then, with the GIL, for a thread that waits for the GIL.
    """
    os.environ |= {"UNIPAR_OBSERVE": job["settings"], "MASTER_PORT": port}
    output = os.open(Path(job["script"]).with_suffix(f".{os.environ['RANK']}.log"), os.O_CREAT | os.O_WRONLY, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(SECONDS - 5)
    sys.argv = [job["script"]]
    code, kept = 0, {}
    try:
        kept.update(runpy.run_path(job["script"], run_name="__main__"))  # its objects live to the end
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int, job: dict[str, Any]) -> None:
    """Wait for a script, and end it if it takes too long."""
    until = time.monotonic() + SECONDS
    code = None
    while code is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.01)
    Path(job["script"]).with_suffix(f".{os.environ['RANK']}.code").write_text(str(code), "utf-8")


if __name__ == "__main__":
    main()
