"""Device lines: which there are in a module, and that a process records those which it executes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.support.softcuda.coverage.device_lines import ROOT, find_device_lines
from tests.support.softcuda.coverage.exceptions import EXCEPTIONS
from tests.support.softcuda.coverage.recorder import RECORDS, read_records
from tests.support.softcuda.emulation import emulated_environment
from tests.support.softcuda.processes import EmulatedDevice

MODULE = """
import torch

def move(batch, device, config, again):
    if again and device.type == "cpu":
        return batch
    name = "no" if device.type == "cpu" else "some"
    on_device = device.type != "cpu"
    if on_device:
        batch = batch.to(device)
    elif again:
        batch = batch.clone()
    if not on_device or again:
        batch = batch.detach()
    try:
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        batch = batch.cpu()
    if config.model.offload == "none":
        return batch
    return batch.cpu()
"""


def test_device_lines_of_a_module() -> None:
    """Arms of tests that the CPU fails, what names torch's interface, handlers of a device's errors: no other line."""
    found = find_device_lines(ast.parse(MODULE), "unipar/module.py")
    assert [ast.unparse(node).splitlines()[0] for node in found.nodes] == [
        "'some'",
        "batch = batch.to(device)",
        "again",
        "torch.cuda.synchronize()",
        "batch = batch.cpu()",
        "return batch.cpu()",
    ]


def test_lines_that_a_thread_of_autograd_executes_are_recorded(emulated: EmulatedDevice, tmp_path: Path) -> None:
    """A hook of a tensor on the device runs in a thread that Python did not start."""
    del emulated  # it is built, or the test is skipped
    code = (
        "import torch; from unipar.distributed.device import synchronize\n"
        "x = torch.ones(2, device='cuda', requires_grad=True)\n"
        "x.register_hook(lambda g: synchronize(g.device))\n"
        "x.sum().backward()\n"
        "import os; os._exit(0)\n"
    )
    records = tmp_path / "records"
    environment = {**os.environ, **emulated_environment(), RECORDS: str(records)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    file = "unipar/distributed/device.py"
    source = (ROOT / file).read_text("utf-8").splitlines()
    executed = {
        (machine, source[line - 1].strip()) for machine, where, (line, _) in read_records(records) if where == file
    }
    assert executed == {
        ("a100", "_module(device).synchronize(device)"),
        ("a100", "return torch.get_device_module(device)"),
    }


def test_every_exception_is_a_device_line() -> None:
    """The list of lines that no test executes names none that is gone."""
    for file, reasons in EXCEPTIONS.items():
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        texts = [ast.unparse(node) for node in find_device_lines(tree, file).nodes]
        assert [b for b in reasons if not any(text.startswith(b) for text in texts)] == [], file
