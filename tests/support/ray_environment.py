"""An environment of its own with Ray, on top of the one that runs: `make ray` makes it once, in build/."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.support.world import ROOT

PLACE = ROOT / "build/ray"
DISK_BYTES = 0.6e9


class NoRay(Exception):
    """The environment cannot be made; the message says why."""


def is_here() -> bool:
    """Whether this process runs in it."""
    return Path(sys.prefix).resolve() == PLACE.resolve()


def make_environment(place: Path = PLACE) -> Path:
    """Return the interpreter of an environment that has Ray, and all that this one has; make it where it is not."""
    python, ready = place / "bin/python", place / "ready"
    if ready.exists() and ready.read_text("utf-8") == sys.prefix:
        return python
    if (free := shutil.disk_usage(ROOT).free) < DISK_BYTES:
        raise NoRay(f"Ray takes {DISK_BYTES / 1e9:.1f} GB, and {ROOT} has {free / 1e9:.1f} GB free: make room")
    sys.stderr.write(f"making an environment with Ray, once: {DISK_BYTES / 1e9:.1f} GB in {place}\n")
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", place], check=True)
    (own,) = place.glob("lib/python*/site-packages")
    folders = [folder for folder in site.getsitepackages() if folder.startswith(sys.prefix)]
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)
    (own / "below.pth").write_text(lines, "utf-8")  # processed as theirs are: with the .pth files in them
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)  # a new one, for --group
    wanted = ("install", "--quiet", "-c", ROOT / "constraints.txt", "--group", f"{ROOT}/pyproject.toml:ray")
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NoRay(f"pip could not install Ray: {(errors or [done.stderr.strip()[-500:]])[-1]}")
    ready.write_text(sys.prefix, "utf-8")
    return python
