"""The wheel, unpacked in an environment without a checkout: the program starts, and the tutorial is played."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support import transcript
from tests.support.forks import ROOT, Forks
from tests.support.transcript import check_shown, numberless, played

PAGE = (ROOT / "docs/tutorial.md").read_text("utf-8").partition("\n## Next pages\n")[0]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the wheel; other packages are those of this one, where unipar is not seen."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-m", "unipar", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )


def test_the_program_starts_without_a_checkout(python: Path, tmp_path: Path) -> None:
    """Version, place of the package, backends by their entry points, and a config that is checked."""
    assert run(python, tmp_path, "--version").stdout.startswith("unipar 0.1.0")
    where = subprocess.run(
        [python, "-c", "import unipar; print(unipar.__file__)"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1])
    files = {block.text.partition("\n")[0].removeprefix("# "): block.text for block in transcript.blocks(PAGE)}
    for name in ("train.py", "train.yaml"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    checked = run(python, tmp_path, "check", "train.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("train.yaml: good\n  strategy  native/nothing, 2 ranks on cpu\n")


@pytest.mark.sweep
def test_the_tutorial_from_the_wheel(
    python: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its end; what is shown is printed, numbers apart."""

    def run_installed(command: str, folder: Path, forks: Forks) -> subprocess.CompletedProcess[str]:
        return run(python, folder, *shlex.split(command)[1:])

    monkeypatch.setattr(transcript, "run_unipar", run_installed)
    for shown, printed in played(PAGE, tmp_path, forks):
        check_shown(numberless(shown.output), numberless(printed.replace(str(tmp_path), "/home/you/tutorial")))
