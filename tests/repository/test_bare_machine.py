"""The bare machine of `make fresh`: what it takes from README and from this machine, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.bare_machine import (
    NETWORK_FAILS,
    PASSED_ON,
    BareMachine,
    Result,
    apt_sources,
    exit_code,
    main,
    mounted_below,
    named_paths,
    outermost,
    readme_commands,
    readme_packages,
    reason_no_namespaces,
    report,
)
from tests.support.programs import skip_because
from tests.support.world import ROOT, SOON, eventually

README = (ROOT / "README.md").read_text("utf-8")
in_namespaces = skip_because(reason_no_namespaces())
SYSTEM = [Path(path) for path in ("/usr", "/bin", "/lib", "/lib64", "/etc") if Path(path).exists()]
"""Folders of this machine with which an empty one can be entered."""


def test_what_readme_says() -> None:
    """Its packages and its two commands: what a newcomer copies."""
    assert readme_packages(README) == ["make", "git", "g++", "python3-venv", "python3-dev"]
    assert readme_commands(README) == ["make demo", "make test"]


def test_variables_that_count_there_too() -> None:
    """pip's, certificates and proxies; no cache, and nothing else."""
    names = ["PIP_FIND_LINKS", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "https_proxy", "PIP_CACHE_DIR", "PATH", "HOME"]
    assert [name for name in names if PASSED_ON.fullmatch(name)] == names[:4]


@pytest.mark.parametrize(
    ("setting", "paths"),
    [
        ("[global]\ncert = /etc/ssl/ca.crt\nfind-links = /data/wheels\n", ["/etc/ssl/ca.crt", "/data/wheels"]),
        ("extra-index-url = file:///data/pypi/simple file:///b/x", ["/data/pypi", "/b/x"]),
        ("index-url = https://pypi.example/simple", []),
        ("/etc/ssl/certs", ["/etc/ssl/certs"]),
    ],
)
def test_paths_in_settings_of_pip(setting: str, paths: list[str]) -> None:
    """Files and folders; an index in a folder comes with the files beside it, and an address names none."""
    assert named_paths(setting) == paths


def test_folders_in_folders() -> None:
    """One that is in another is not mounted again."""
    assert outermost(map(Path, ["/a/b", "/c", "/a", "/a/b/c", "/ab"])) == [Path("/a"), Path("/ab"), Path("/c")]


def test_sources_of_another_release(tmp_path: Path) -> None:
    """Those of this Debian, with the release's name replaced; other people's sources are left out."""
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://x/debian bookworm main\n", "utf-8")
    (tmp_path / "sources.list.d/other.list").write_text("deb http://y stable main\n", "utf-8")
    (tmp_path / "sources.list.d/debian.sources").write_text("Suites: bookworm bookworm-updates\n", "utf-8")
    assert apt_sources("bookworm", "trixie", tmp_path) == [
        "deb http://x/debian trixie main\n",
        "Suites: trixie trixie-updates\n",
    ]
    assert apt_sources("", "trixie", tmp_path) == []


def test_mounts_in_a_folder() -> None:
    """By the kernel's table; a folder with such a mount is not removed."""
    table = (
        "1 0 8:1 / / rw - ext4 a rw\n23 22 0:5 / /x/system/dev rw - devtmpfs b rw\n24 22 0:6 / /xy rw - tmpfs c rw\n"
    )
    assert mounted_below(Path("/x"), table) == ["/x/system/dev"]


@pytest.mark.parametrize(
    ("line", "network"),
    [
        ("WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError'", True),
        ("ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='x', port=443)", True),
        ("ERROR: No matching distribution found for pymdown-extensions==13.1.2", False),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", False),
    ],
)
def test_what_is_the_networks_fault(line: str, network: bool) -> None:
    """An index that cannot be reached; a pin that this Python cannot install is ours."""
    assert bool(NETWORK_FAILS.search(line)) is network


def test_the_report() -> None:
    """A line for each command. Where only the network failed, nothing is known: exit 3."""
    good, bad = Result("root", "make demo", 0, 204.4), Result("user", "make test", 2, 59.6)
    lost = Result("user", "make test", 2, 1.0, network=True)
    assert report([good, bad, lost]).splitlines() == [
        "root  make demo   3 min 24 s  succeeded",
        "user  make test   1 min 00 s  failed (2)",
        "user  make test   0 min 01 s  failed: pip did not reach the index",
    ]
    assert [exit_code(results) for results in ([good], [good, bad], [good, lost], [bad, lost])] == [0, 1, 3, 1]


@in_namespaces
def test_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason, and an exit code that is not that of a command that failed; nothing stays."""
    monkeypatch.setattr("tests.support.bare_machine.DISK_BYTES", 1e18)
    assert main(["--place", str(tmp_path)]) == 3
    reason = f"it takes 1000000000 GB, and {tmp_path} has "
    assert capsys.readouterr().out.startswith(f"fresh: no bare machine can be made here: {reason}")
    monkeypatch.setattr("tests.support.bare_machine.DISK_BYTES", 0)
    monkeypatch.setattr("tests.support.bare_machine.require_mmdebstrap", lambda: None)
    monkeypatch.setattr("tests.support.bare_machine.debian_release", lambda: "")
    assert main(["--place", str(tmp_path)]) == 3
    assert "this machine has no sources of Debian in /etc/apt" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[BareMachine]:
    """An empty folder with the programs of this machine, in the place of a Debian."""
    monkeypatch.setattr("tests.support.bare_machine.DISK_BYTES", 0)
    with BareMachine(tmp_path) as made:
        made.system.mkdir()
        made.read_only = SYSTEM
        yield made
    assert list(tmp_path.iterdir()) == []


@in_namespaces
def test_what_a_command_sees(machine: BareMachine, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Its own root and processes, and of this machine the folders that it was given, of which one can be written."""
    shared = machine.folder / "shared"
    shared.mkdir()
    command = f"ls /mnt; ls -d /*; echo $HOME $$ > {shared}/said; touch /usr/x || cat /proc/1/comm; exit 5"
    result = machine.run("root", command, share=[shared])
    seen = capfdbinary.readouterr().out.decode().splitlines()
    own = {"/dev", "/mnt", "/proc", "/sys", *map(str, SYSTEM), f"/{shared.parts[1]}"}
    assert (set(seen[:-2]), seen[-1], result.code) == (own, "bash", 5)
    assert "Read-only file system" in seen[-2]
    assert (shared / "said").read_text("utf-8") == "/root 1\n"
    assert mounted_below(machine.folder, Path("/proc/self/mountinfo").read_text("utf-8")) == []


STOPPED = """
import sys
from pathlib import Path
from tests.support import bare_machine
bare_machine.DISK_BYTES = 0
bare_machine.BareMachine.make = lambda self, packages, suite: self.system.mkdir()
bare_machine.BareMachine.clone = lambda self, user: "/"
made = bare_machine.BareMachine.__init__
def init(self, place):
    made(self, place)
    self.read_only = [Path(path) for path in sys.argv[3:]]
bare_machine.BareMachine.__init__ = init
command = "(trap '' TERM INT; sleep 43210) & sleep 43211"
sys.exit(bare_machine.main(["--place", sys.argv[1], "--as", "root", "--command", command, "--share", sys.argv[2]]))
"""


def sleepers() -> list[bytes]:
    """Return the command lines of the processes that the machine's command starts."""
    lines: list[bytes] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines.append((entry / "cmdline").read_bytes())
    return [line for line in lines if line in (b"sleep\x0043210\0", b"sleep\x0043211\0")]


@in_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c(number: signal.Signals, tmp_path: Path) -> None:
    """Processes of the machine, its mounts and its folder are gone, whatever its processes ignore."""
    place, shared = tmp_path / "place", tmp_path / "shared"
    place.mkdir()
    shared.mkdir()
    words = [sys.executable, "-c", STOPPED, place, shared, *SYSTEM]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as fresh:
        eventually(lambda: len(sleepers()) == 2, "the command did not start")
        fresh.send_signal(number)
        try:
            printed, _ = fresh.communicate(timeout=SOON)
        finally:
            fresh.kill()
    assert fresh.returncode == 130
    assert [line.partition("unipar-fresh-")[0] for line in printed.splitlines()] == [
        "fresh: root: (trap '' TERM INT; sleep 43210) & sleep 43211",
        f"fresh: removing {place}/",
        "fresh: stopped",
    ]
    assert sleepers() == []
    assert os.listdir(place) == []
