"""`unipar doctor`."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from unipar.cli.commands.options import JsonOption, OutOption
from unipar.distributed.machine_checks import MachineCheck, check_machine, rows_of_checks
from unipar.errors import ConfigError
from unipar.utils.table import format_table

if TYPE_CHECKING:
    from unipar.launcher.preflight.outcome import Examination


def run_doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="With --across: the config to be run.", show_default=False)
    ] = None,
    out: OutOption = None,
    *,
    across: Annotated[bool, typer.Option("--across", help="Compare all machines of a launcher.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or with --across all machines of a launcher.

    Prints the status of each check, and a remedy if it is not ok; exit 1 if a check fails.

    \b
    unipar doctor
    unipar doctor --json

    With --across, start it as you would start a run. Rank 0 prints one table of what differs between the machines or
    fails: versions, processors, GPUs, clocks, network, limits. With FILE it also compares the task's code, the config,
    its backend and device, and the run folder. One process on each machine is enough. Run the line on every machine;
    with --hostfile, -H or srun, run it on one.

    \b
    torchrun --nnodes 2 --node-rank K --master-addr HOST --master-port 29500 -m unipar doctor --across train.yaml
    accelerate launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank K
      --main_process_ip HOST --main_process_port 29500 -m unipar doctor --across train.yaml
        (these on each machine, with its number K; HOST is that of K = 0)
    deepspeed --hostfile hosts --num_gpus 1 --module unipar doctor --across train.yaml
    horovodrun -np 2 -H a:1,b:1 python -m unipar doctor --across train.yaml
    mpirun -np 2 -H a,b -x MASTER_ADDR=a -x MASTER_PORT=29500 python -m unipar doctor --across train.yaml
    srun --nodes 2 --ntasks-per-node 1 python -m unipar doctor --across train.yaml
        (these once)
    """
    if across:
        examine_machines(file, out, as_json=as_json)
    if file is not None or out is not None:
        raise typer.BadParameter("FILE and --out are for --across, which compares machines; `unipar check` is for one")
    if not examine_machine(as_json=as_json):
        raise typer.Exit(1)


def _refuse_no_launcher() -> ConfigError:
    """Return the error of `--across` without a launcher, with the commands of the help."""
    commands = inspect.cleandoc(run_doctor.__doc__ or "").rpartition("\b\n")[2].replace(" train.yaml", "")
    head = "doctor --across compares machines, and no launcher started this process. Start it as a run:"
    return ConfigError(f"{head}\n{textwrap.indent(commands, '  ')}")


def examine_machines(file: Path | None, out: str | None, *, as_json: bool) -> NoReturn:
    """Compare all machines of a launcher; rank 0 prints what came of it, and all exit with the same code."""
    from unipar.launcher.preflight.examination import examine_across, place_under_launcher

    place = place_under_launcher()
    if place is None:
        raise _refuse_no_launcher()

    def show(outcome: Examination) -> None:
        typer.echo(json.dumps(outcome.to_json(), indent=2) if as_json else outcome.table())
        sys.stdout.flush()

    outcome = examine_across(place, file, out, show)
    sys.stderr.flush()
    os._exit(0 if outcome.ok else 1)  # threads of the network libraries may abort an ordinary end


TORCH_PROBE_SECONDS = 120.0
"""Seconds after which the import of torch is given up."""


_TORCH_PROBE = """
import json, torch
from unipar.distributed.device import describe_build, list_device_names
print(json.dumps([str(torch.__version__), describe_build(), list_device_names()]))
"""


def examine_machine(*, as_json: bool = False) -> bool:
    """Run all checks and print them; return False where one fails."""
    checks = list(run_all_checks())
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        sys.stdout.write(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2) + "\n")
    elif sys.stdout.isatty():
        _draw_rows(rows_of_checks(checks))
    else:
        sys.stdout.write(format_table(("", "what", "found"), rows_of_checks(checks), width=120) + "\n")
    return ok


def run_all_checks() -> Iterator[MachineCheck]:
    """Yield every check: torch and the backends first, then the machine, then launchers."""
    yield from _check_torch()
    yield from _check_backends()
    yield from check_machine()
    yield from _check_launchers()


def _check_torch() -> Iterator[MachineCheck]:
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=TORCH_PROBE_SECONDS,
        )
        error = probe.stderr.strip().splitlines()[-1:] or [f"exit code {probe.returncode}"]
    except subprocess.TimeoutExpired:
        probe, error = None, [f"importing it took longer than {TORCH_PROBE_SECONDS:g} s"]
    if probe is None or probe.returncode:
        yield MachineCheck("torch", "fail", error[0], "pip install torch")
        return
    version, build, devices = json.loads(probe.stdout.splitlines()[-1])
    yield MachineCheck("torch", "ok", f"{version}, built for {build or 'the CPU'}")
    yield check_gpus(build, devices, driver=Path("/dev/nvidiactl").exists())


def check_gpus(build: str, devices: list[str], *, driver: bool) -> MachineCheck:
    """Return the check of the accelerators: those that torch sees, compared with the installed NVIDIA driver.

    `build` is what torch was built for ("CUDA 12.8"); empty: the CPU.
    """
    if devices:
        return MachineCheck("GPUs", "ok", f"{len(devices)}: {', '.join(sorted(set(devices)))}")
    if not driver:
        return MachineCheck("GPUs", "ok", "none: training is on the CPU")
    if not build:
        return MachineCheck(
            "GPUs", "warn", "there is an NVIDIA driver, but this torch is for the CPU", "install a torch with CUDA"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        finding = f"torch sees none with CUDA_VISIBLE_DEVICES={visible!r}"
        return MachineCheck("GPUs", "warn", finding, "unset CUDA_VISIBLE_DEVICES")
    return MachineCheck(
        "GPUs", "warn", f"there is an NVIDIA driver, but torch for {build} sees no GPU", "update the driver"
    )


def _check_backends() -> Iterator[MachineCheck]:
    from unipar.backend.installed import probe_imports
    from unipar.backend.registry import backend_names, find_backend

    for name, probe in probe_imports(backend_names()).items():
        hint = find_backend(name).hint or "it comes with unipar"
        if probe.version:
            yield MachineCheck(f"backend {name}", "ok", probe.version)
        elif probe.absent:
            yield MachineCheck(f"backend {name}", "warn", probe.absent.rpartition(": ")[0], hint)
        else:
            yield MachineCheck(f"backend {name}", "fail", probe.broken or "", f"install it again: {hint}")


def _check_launchers() -> Iterator[MachineCheck]:
    """Yield the installed launchers and the ports that each opens; unipar's own listens on loopback only."""
    from unipar.backend.registry import list_launchers
    from unipar.utils.files import path_with_scripts

    listed: set[str] = set()
    for launcher in sorted(list_launchers(), key=lambda launcher: launcher.order):
        program = launcher.name.split()[0]
        if program in listed or not shutil.which(program, path=path_with_scripts()):
            continue
        listed.add(program)
        note = "not known to listen beyond loopback"
        if launcher.opens:
            note = f"{launcher.opens}; use it on a private network only"
        yield MachineCheck(f"launcher {program}", "ok", f"found: {note}")


def _draw_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the rows in colours, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    drawn = Table.grid(padding=(0, 2))
    for status, name, finding in rows:
        drawn.add_row(Text(status, style=style.get(status, "")), name, Text(finding, style="" if status else "bold"))
    Console().print(drawn)
