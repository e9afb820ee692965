"""`unipar doctor`: each thing that can be wrong is told with its remedy."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from unipar.backend import installed
from unipar.cli.commands import doctor
from unipar.cli.commands import doctor as commands_doctor
from unipar.distributed import machine_checks
from unipar.distributed.machine_checks import MachineCheck


@pytest.mark.usefixtures("probed")
def test_a_machine_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    """Here nothing fails, and each thing that the README promises is looked at."""
    assert doctor.examine_machine(as_json=True) is True
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    names = [check["name"] for check in told["checks"]]
    assert names[:2] == ["torch", "GPUs"]
    assert {"backend native", "c++ compiler", "cmake", "loopback", "host name", "/dev/shm", "open files"} <= set(names)
    assert {check["status"] for check in told["checks"]} <= {"ok", "warn"}


def test_one_failure_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe it is plain text, with the remedy below what it is for."""
    found = [
        MachineCheck("python", "ok", "3.11.2"),
        MachineCheck("loopback", "fail", "it cannot be reached", "ip link set lo up"),
    ]
    monkeypatch.setattr(commands_doctor, "run_all_checks", lambda: iter(found))
    assert doctor.examine_machine() is False
    assert capsys.readouterr().out == (
        "      what      found\n"
        "ok    python    3.11.2\n"
        "fail  loopback  it cannot be reached\n"
        "                -> ip link set lo up\n"
    )


def test_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own error is the finding."""
    monkeypatch.setattr(
        commands_doctor, "_TORCH_PROBE", "raise ImportError('libtorch_cpu.so: cannot open shared object file')"
    )
    assert list(doctor._check_torch()) == [  # pyright: ignore[reportPrivateUsage]
        MachineCheck(
            "torch", "fail", "ImportError: libtorch_cpu.so: cannot open shared object file", "pip install torch"
        )
    ]


def test_backends_absent_and_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not installed is a warning; one that is installed and broken is a failure."""
    seen = {
        "horovod": installed.ImportProbe(
            absent="backend 'horovod' needs horovod, not installed here: unipar install horovod"
        ),
        "deepspeed": installed.ImportProbe(broken="ImportError: no such symbol"),
    }
    monkeypatch.setattr(installed, "probe_imports", lambda _: seen)  # pyright: ignore[reportUnknownLambdaType]
    said = "backend 'horovod' needs horovod, not installed here"
    assert list(doctor._check_backends()) == [  # pyright: ignore[reportPrivateUsage]
        MachineCheck("backend horovod", "warn", said, "unipar install horovod"),
        MachineCheck(
            "backend deepspeed",
            "fail",
            "ImportError: no such symbol",
            "install it again: pip install 'unipar[deepspeed]'",
        ),
    ]


@pytest.mark.parametrize(
    ("build", "devices", "driver", "visible", "check"),
    [
        ("CUDA 13.0", ["H200", "H200"], True, None, MachineCheck("GPUs", "ok", "2: H200")),
        ("", [], False, None, MachineCheck("GPUs", "ok", "none: training is on the CPU")),
        (
            "",
            [],
            True,
            None,
            MachineCheck(
                "GPUs", "warn", "there is an NVIDIA driver, but this torch is for the CPU", "install a torch with CUDA"
            ),
        ),
        (
            "CUDA 13.0",
            [],
            True,
            "",
            MachineCheck("GPUs", "warn", "torch sees none with CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        ),
        (
            "CUDA 13.0",
            [],
            True,
            None,
            MachineCheck(
                "GPUs", "warn", "there is an NVIDIA driver, but torch for CUDA 13.0 sees no GPU", "update the driver"
            ),
        ),
    ],
)
def test_gpus(
    build: str,
    devices: list[str],
    driver: bool,
    visible: str | None,
    check: MachineCheck,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPUs that torch sees are compared with the driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert doctor.check_gpus(build, devices, driver=driver) == check


def test_a_host_name_that_does_not_resolve() -> None:
    """The remedy is the line that it needs."""
    check = machine_checks.check_hostname("no-such-host.invalid")
    assert check.status == "warn"
    assert check.finding.startswith("no-such-host.invalid does not resolve (")
    assert check.remedy == "add the line '127.0.1.1 no-such-host.invalid' to /etc/hosts"


def test_loopback_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """No world can meet then."""

    def refuse(*_: object) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert machine_checks.check_loopback() == MachineCheck(
        "loopback",
        "fail",
        "127.0.0.1 cannot be reached: [Errno 99] Cannot assign requested address",
        "ip link set lo up",
    )


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's 64 MiB are too little, and none at all is a failure."""
    assert machine_checks.check_shared_memory(tmp_path / "none").status == "fail"
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage(64 * 2**20, 0, 63 * 2**20))  # pyright: ignore[reportUnknownLambdaType]
    assert machine_checks.check_shared_memory(tmp_path) == MachineCheck(
        str(tmp_path),
        "warn",
        "63 of 64 MiB free; data workers may crash",
        "docker run --shm-size=1g, or --ipc=host",
    )


class _Usage:
    def __init__(self, total: int, used: int, free: int) -> None:
        self.total, self.used, self.free = total, used, free


def test_leftovers_in_shared_memory(tmp_path: Path) -> None:
    """A file that a process holds open is no leftover; one that nobody holds is named with its size."""
    (tmp_path / "left").write_bytes(bytes(3 * 2**20))
    with (tmp_path / "held").open("wb"):
        check = machine_checks.check_leftover_files(tmp_path)
    assert check == MachineCheck(
        f"left in {tmp_path}", "warn", "1 file that no process uses, 3.0 MiB", f"rm {tmp_path / 'left'}"
    )


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is told, and what to type."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))  # pyright: ignore[reportUnknownLambdaType]
    first, second, third = machine_checks.check_limits()
    assert first == MachineCheck(
        "open files", "warn", "at most 256; ranks with data workers need 1024", "ulimit -n 4096"
    )
    assert second.remedy == "ulimit -u 4096"
    assert third.status == "ok"


def test_a_long_temporary_folder(tmp_path: Path) -> None:
    """Paths of sockets end at 108 bytes."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    check = machine_checks.check_temporary_folder(folder)
    assert (check.status, check.remedy) == ("fail", "TMPDIR=/tmp")
    assert check.finding == f"{folder} is {len(str(folder))} bytes long; sockets in it need 60 or fewer"
    assert (
        machine_checks.check_temporary_folder(tmp_path / "none").finding == f"{tmp_path / 'none'} cannot be written to"
    )


def test_a_lock_of_a_killed_compilation(tmp_path: Path) -> None:
    """An old one is named; a young one may be somebody's who compiles."""
    for name in ("old", "young"):
        (tmp_path / "torch_extensions" / name).mkdir(parents=True)
        (tmp_path / "torch_extensions" / name / "lock").touch()
    old = tmp_path / "torch_extensions/old/lock"
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    check = machine_checks.check_stale_locks(tmp_path)
    assert (check.status, check.remedy) == ("warn", f"rm {old}")


def test_launchers_say_what_they_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is installed, once, though a program may start worlds in several ways."""
    here = ("torchrun", "accelerate", "mpirun", "srun", "deepspeed")
    monkeypatch.setattr("shutil.which", lambda name, path: name if name in here else None)  # pyright: ignore[reportUnknownLambdaType]
    found = {check.name: check.finding for check in doctor._check_launchers()}  # pyright: ignore[reportPrivateUsage]
    private = "; use it on a private network only"
    assert found == {
        "launcher accelerate": f"found: its agent listens on every interface at the master port{private}",
        "launcher torchrun": "found: its agent listens on every interface (the master port, and two more with "
        f"--standalone){private}",
        "launcher deepspeed": "found: not known to listen beyond loopback",
        "launcher mpirun": f"found: it listens on every interface while it runs{private}",
        "launcher srun": "found: it listens on every interface for its tasks' output; Slurm's daemons do at their own "
        f"ports{private}",
    }


def test_across_without_a_launcher(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to start it under each."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    told = unipar("doctor", "--across")
    assert told.code == 2
    assert told.err.splitlines()[0] == (
        "unipar: doctor --across compares machines, and no launcher started this process. Start it as a run:"
    )
    launchers = ("torchrun", "accelerate launch", "deepspeed", "horovodrun", "mpirun", "srun")
    assert [name for name in launchers if f"\n  {name} -" not in told.err] == []


def test_across_on_one_machine(unipar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to compare."""
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    told = unipar("doctor", "--across")
    assert (told.code, told.err) == (
        3,
        "unipar: doctor --across compares machines, and whoever set RANK and WORLD_SIZE has started ranks on this one "
        "alone: have it start one on each machine, or look at this machine with `unipar doctor`\n",
    )


def test_a_config_is_for_across(unipar: Any) -> None:
    """One machine is looked at by `unipar check`."""
    told = unipar("doctor", "x.yaml")
    assert told.code == 2
    assert "FILE and --out are for --across, which compares machines" in told.err
