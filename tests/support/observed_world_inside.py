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

ALWAYS = ("torch", "torch._dynamo", "torch.distributed.tensor", "unipar.observing.process.observer")
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
    store = open_store()  # noqa: F841  it lives as long as this function
    for job in jobs:
        if not (pid := os.fork()):
            run(job)
        wait(pid, job)


def open_store() -> object:
    """Return the store in which the ranks of all scripts meet; rank 0 keeps it open."""
    from torch.distributed import TCPStore

    here = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*here, is_master=True, wait_for_workers=False) if os.environ["RANK"] == "0" else None


def run(job: dict[str, Any]) -> NoReturn:
    """Run a script as `torchrun` would start it in a world of its own, and end with its exit code.

    The interpreter is not finalized: torch waits there, with the GIL, for a thread of gloo that waits for the GIL.
    """
    os.environ |= {
        "UNIPAR_OBSERVE": job["settings"],
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # one that is there
        "TORCHELASTIC_RESTART_COUNT": str(job["number"]),  # the prefix of its keys there
    }
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
