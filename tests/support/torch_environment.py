"""Environments with one version of torch and Python each, for `make versions`; kept in a cache for later calls."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.world import ROOT
from unipar.errors import UniparError
from unipar.utils.files import cache_folder
from unipar.utils.text import count_of, format_size

EXTRAS = "deepspeed,accelerate,horovod,tensorboard,weights,examples,report,wandb,mlflow,remote"
FOLDER_VARIABLE = "UNIPAR_VERSIONS"
DOWNLOAD_BYTES, DISK_BYTES = 2.1e9, 7.0e9
"""About what one environment takes, to download and on disk: 1.7 and 5.9 GB with torch 2.11, 2.1 and 6.7 with 2.15."""


class NoEnvironment(UniparError):
    """No version can be tried, or an environment cannot be made; the message says why."""


def environments_folder() -> Path:
    """Return the folder that keeps the environments."""
    return Path(os.environ.get(FOLDER_VARIABLE) or cache_folder() / "versions").absolute()


def torch_requirement(pyproject: Path = ROOT / "pyproject.toml") -> Requirement:
    """Return what pyproject.toml asks of torch."""
    with pyproject.open("rb") as file:
        asked = map(Requirement, tomllib.load(file)["project"]["dependencies"])
    return next(one for one in asked if one.name == "torch")


def pinned_torch(text: str) -> str:
    """Return the version of torch in constraints.txt."""
    return _one_pin(text).removeprefix("torch==")


def _one_pin(text: str) -> str:
    pins = re.findall(r"(?m)^torch==.*$", text)
    if len(pins) != 1:
        raise NoEnvironment(f"constraints.txt pins torch {count_of(len(pins), 'time')}; it must be once")
    return pins[0]


def newer_pythons(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """Return the Pythons that pyproject.toml lists as tried and that are newer than this one: 3.12, 3.13."""
    with pyproject.open("rb") as file:
        lines: list[str] = tomllib.load(file)["project"]["classifiers"]
    tried = [line.removeprefix("Programming Language :: Python :: ") for line in lines if " :: Python :: 3." in line]
    return [name for name in tried if tuple(map(int, name.split("."))) > sys.version_info[:2]]


def find_python(name: str) -> str | None:
    """Return the program of a Python such as 3.12 if it is here and starts."""
    program = shutil.which(f"python{name}")
    works = program and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
    return program if works else None


def oldest_and_newest(released: Iterable[str], asked: Requirement) -> list[str]:
    """Return the oldest release that is allowed and the newest, without local labels such as "+cpu"."""
    allowed = {Version(Version(text).public) for text in released}
    allowed = sorted(v for v in allowed if not v.is_prerelease and v in asked.specifier)
    if not allowed:
        raise NoEnvironment(f"the package index has no release of {asked}")
    return list(dict.fromkeys((str(allowed[0]), str(allowed[-1]))))


def released_versions() -> list[str]:
    """Return the versions of torch that the package index has for this Python."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise NoEnvironment(f"pip cannot ask for torch's releases: {said[-1]}; name them: --torch 2.11.0")
    return json.loads(done.stdout)["versions"]


def constraints_for(torch: str, text: str) -> str:
    """Return the constraints with another torch; all else stays as it is pinned."""
    return text.replace(f"{_one_pin(text)}\n", f"torch=={torch}\n")


def require_space(folder: Path, torch: str, free: float) -> None:
    """Say what will be downloaded; raise if there is no room for it."""
    sizes = f"about {format_size(DOWNLOAD_BYTES)} to download, {format_size(DISK_BYTES)} on disk"
    if free < DISK_BYTES:
        raise NoEnvironment(
            f"an environment with torch {torch} takes {sizes}; {folder} has {format_size(free)} free: "
            f"make room, or name another folder: {FOLDER_VARIABLE}=FOLDER"
        )
    say(f"torch {torch}: {sizes}, into {folder} ({format_size(free)} free); kept there for later calls")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def only_user(folder: Path) -> Generator[None]:
    """Context manager: nobody else uses the environments in this folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NoEnvironment(
                f"another `make versions` uses {folder}; wait for it, or name another folder: {FOLDER_VARIABLE}=FOLDER"
            ) from None
        yield


class Environment:
    """Virtual environment with one version of torch and this checkout.

    Logs and results of the latest call stay in a folder beside it.
    """

    def __init__(self, folder: Path, torch: str, python: str) -> None:
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
        self.torch, self.python = torch, python
        self.place = folder / f"torch-{torch}-python{said}"
        self.results = folder / f"{self.place.name}-results"
        shutil.rmtree(self.results, ignore_errors=True)
        self.results.mkdir(parents=True)
        self.bin = self.place / "bin"
        self.variables = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "COLUMNS")},
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "TORCH_EXTENSIONS_DIR": str(self.results / "extensions"),
        }

    def run(self, name: str, command: Sequence[str | Path]) -> tuple[int, str]:
        """Run a command of this environment in the checkout, its output shown and kept in a log; return both."""
        say(f"torch {self.torch}: {name}")
        log = self.results / f"{name.replace(' ', '-')}.log"
        with log.open("wb", buffering=0) as file:
            started = subprocess.Popen(
                [str(self.bin / "python"), *map(str, command)],
                cwd=ROOT,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert started.stdout is not None
            while part := os.read(started.stdout.fileno(), 65536):
                file.write(part)
                sys.stderr.buffer.write(part)
                sys.stderr.flush()
            code = started.wait()
        return code, log.read_text("utf-8", errors="replace")

    def make(self) -> str:
        """Make the environment, or bring it up to date; return the versions of torch and Python in it."""
        if not (self.place / "ready").exists():
            require_space(self.place.parent, self.torch, shutil.disk_usage(self.place.parent).free)
            subprocess.run([self.python, "-m", "venv", "--clear", self.place], check=True)
        constraints = self.results / "constraints.txt"
        constraints.write_text(constraints_for(self.torch, (ROOT / "constraints.txt").read_text("utf-8")), "utf-8")
        pip = ("-m", "pip", "--disable-pip-version-check", "install", "--constraint", constraints)
        loud = () if (self.place / "ready").exists() else ("--progress-bar", "on")
        for name, quiet, words in (
            ("pip", ("--quiet",), ("pip",)),
            ("torch", loud or ("--quiet",), (f"torch=={self.torch}", "setuptools", "wheel")),
            ("build", ("--quiet",), ("--group", "build")),
            ("unipar", ("--quiet",), ("ruff", "--group", "test", "--no-build-isolation", "--editable", f".[{EXTRAS}]")),
        ):
            code, said = self.run(f"installing {name}", (*pip, *quiet, *words))
            if code:
                errors = [line for line in said.splitlines() if line.startswith("ERROR")]
                raise NoEnvironment(f"pip could not install {' '.join(words)}: {(errors or [said[-500:]])[-1]}")
        (self.place / "ready").touch()
        asked = "import platform, torch, unipar; print(torch.__version__, platform.python_version(), unipar.__file__)"
        code, said = self.run("import", ("-c", asked))
        torch, python, file = (said.splitlines() or [""])[-1].split(maxsplit=2) if not code else ("", "", said)
        if code or not Path(file).is_relative_to(ROOT):
            raise NoEnvironment(f"{self.place} does not import this checkout: {said.strip()[-500:]}")
        return f"{torch} {python}"

    def install_horovod(self) -> str:
        """Build Horovod for this torch; return "", or why it cannot be had."""
        code, said = self.run("horovod", ("-m", "unipar", "install", "horovod"))
        if not code:
            return ""
        text = said.rpartition("unipar: ")[2] or said[-500:]
        return " ".join(text.split())
