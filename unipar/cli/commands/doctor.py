"""`unipar doctor`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import typer

from unipar.backend.installed import probe_imports
from unipar.backend.registry import backend_names, find_backend, list_launchers
from unipar.cli.machine_checks import MachineCheck, check_machine
from unipar.cli.options import JsonOption
from unipar.utils.files import path_with_scripts
from unipar.utils.table import format_table


def run_doctor(*, as_json: JsonOption = False) -> None:
    """What helps or hinders on this machine.

    A status and a remedy each; exit 1 where something fails.

    \b
    unipar doctor
    unipar doctor --json
    """
    from unipar.cli.commands.doctor import examine_machine as examined

    if not examined(as_json=as_json):
        raise typer.Exit(1)


TORCH_PROBE_SECONDS = 120.0


_TORCH_PROBE = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps([str(torch.__version__), torch.version.cuda, devices]))
"""


def examine_machine(*, as_json: bool = False) -> bool:
    """Looks at everything and prints it; False where something fails."""
    found = list(run_all_checks())
    well = all(check.status != "fail" for check in found)
    if as_json:
        sys.stdout.write(json.dumps({"ok": well, "checks": [asdict(check) for check in found]}, indent=2) + "\n")
    elif sys.stdout.isatty():
        _draw_checks(found)
    else:
        sys.stdout.write(format_checks(found) + "\n")
    return well


def run_all_checks() -> Iterator[MachineCheck]:
    """Every check: torch and the backends first, then the machine, then launchers."""
    yield from _check_torch()
    yield from _check_backends()
    yield from check_machine()
    yield from _check_launchers()


def _check_torch() -> Iterator[MachineCheck]:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=TORCH_PROBE_SECONDS,
        )
        error = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
    except subprocess.TimeoutExpired:
        asked, error = None, [f"importing it took longer than {TORCH_PROBE_SECONDS:g} s"]
    if asked is None or asked.returncode:
        yield MachineCheck("torch", "fail", error[0], "pip install torch")
        return
    version, cuda, devices = json.loads(asked.stdout.splitlines()[-1])
    yield MachineCheck("torch", "ok", f"{version}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}")
    yield check_gpus(cuda, devices, driver=Path("/dev/nvidiactl").exists())


def check_gpus(cuda: str | None, devices: list[str], *, driver: bool) -> MachineCheck:
    """What torch sees, held against what is there."""
    if devices:
        return MachineCheck("GPUs", "ok", f"{len(devices)}: {', '.join(sorted(set(devices)))}")
    if not driver:
        return MachineCheck("GPUs", "ok", "none: training is on the CPU")
    if not cuda:
        return MachineCheck(
            "GPUs", "warn", "there is an NVIDIA driver, and a torch for the CPU", "install a torch with CUDA"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        said = f"torch sees none with CUDA_VISIBLE_DEVICES={visible!r}"
        return MachineCheck("GPUs", "warn", said, "unset CUDA_VISIBLE_DEVICES")
    return MachineCheck(
        "GPUs", "warn", f"there is an NVIDIA driver, and torch for CUDA {cuda} sees no GPU", "update the driver"
    )


def _check_backends() -> Iterator[MachineCheck]:
    for name, what in probe_imports(backend_names()).items():
        hint = find_backend(name).hint or "it comes with unipar"
        if what.version:
            yield MachineCheck(f"backend {name}", "ok", what.version)
        elif what.absent:
            yield MachineCheck(f"backend {name}", "warn", what.absent.rpartition(": ")[0], hint)
        else:
            yield MachineCheck(f"backend {name}", "fail", what.broken or "", f"install it again: {hint}")


def _check_launchers() -> Iterator[MachineCheck]:
    """Those that are installed, and what they open to the network; ours opens nothing beyond loopback."""
    told: set[str] = set()
    for launcher in sorted(list_launchers(), key=lambda launcher: launcher.order):
        program = launcher.name.split()[0]
        if program in told or not shutil.which(program, path=path_with_scripts()):
            continue
        told.add(program)
        said = launcher.opens or "nothing beyond loopback is known of it"
        if launcher.opens:
            said += "; use it on a private network only"
        yield MachineCheck(f"launcher {program}", "ok", f"found: {said}")


def format_checks(found: list[MachineCheck]) -> str:
    """Lines for a pipe; a remedy stands below what it is for."""
    rows: list[tuple[str, ...]] = []
    for check in found:
        rows.append((check.status, check.name, check.found))
        if check.remedy:
            rows.append(("", "", f"-> {check.remedy}"))
    return format_table(("", "what", "found"), rows, width=120)


def _draw_checks(found: list[MachineCheck]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    drawn = Table.grid(padding=(0, 2))
    for check in found:
        said = Text(check.found)
        if check.remedy:
            said.append(f"\n-> {check.remedy}", style="bold")
        drawn.add_row(Text(check.status, style=style[check.status]), check.name, said)
    Console().print(drawn)
