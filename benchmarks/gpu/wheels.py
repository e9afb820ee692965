"""Wheels of what unipar needs besides torch: fetched where there is a network, used where there is none.

`python -m benchmarks.gpu.wheels` fetches them for this Python and for CPython 3.12 on x86-64, into `.gpu-wheels`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
WHEELS: Final = ROOT / ".gpu-wheels"
"""Folder of the wheels; git ignores it, so that it has to be copied along by name."""

MOST_BYTES: Final = 64 * 2**20
"""Largest size of all wheels together."""

NEEDED: Final = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("pyyaml", "rich", "markdown-it-py", "mdurl", "pygments", "typer", "annotated-doc", "shellingham"),
    *("nvidia-ml-py", "pytest", "pluggy", "iniconfig", "packaging"),
    *("deepspeed", "einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "tqdm"),
)
"""All that unipar, its tests and DeepSpeed import, except torch, numpy and Accelerate, which the machine has."""

FROM_SOURCE: Final = ("deepspeed",)
"""Packages that are published as source only; their wheels are pure Python and are built here."""

_MANYLINUX = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2014", "2_12", "2010", "2_5", "1")
_PLATFORMS = tuple(f"manylinux{'_' if '_' in version else ''}{version}_x86_64" for version in _MANYLINUX)


class WheelsMissing(Exception):
    """Error of wheels that are not there and cannot be fetched; its text says what to do."""


def pinned_versions() -> dict[str, str]:
    """Return the requirement of each needed package, with the version of constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {normalise(line.split("==")[0]): line.strip() for line in lines if "==" in line}
    return {name: pins[name] for name in NEEDED}


def normalise(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch_wheels(folder: Path = WHEELS) -> list[Path]:
    """Fetch all wheels for this Python and for CPython 3.12 on x86-64, and return them; remove other versions."""
    pins = pinned_versions()
    with tempfile.TemporaryDirectory(prefix="unipar-wheels-") as temporary:
        fresh = Path(temporary)
        for name in FROM_SOURCE:  # DeepSpeed's set-up imports torch, and must not compile its operators
            _run_pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(fresh), pins[name], DS_BUILD_OPS="0")
        plain = [pin for name, pin in pins.items() if name not in FROM_SOURCE]
        _run_pip("download", "--no-deps", "--only-binary=:all:", "-d", str(fresh), *plain)
        target = ["--python-version", "3.12", "--implementation", "cp"]
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        _run_pip("download", "--no-deps", "--only-binary=:all:", *target, *platforms, "-d", str(fresh), *plain)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(fresh, folder)
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size > MOST_BYTES:
        raise WheelsMissing(f"the wheels have {size / 2**20:.0f} MiB, more than the {MOST_BYTES >> 20} that may travel")
    return wheels


def _run_pip(*words: str, offline: bool = False, **variables: str) -> None:
    environment = {**os.environ, **variables}
    if offline:  # other folders and indexes that are configured on this machine must not matter
        environment = {k: v for k, v in environment.items() if not k.startswith("PIP_")} | {
            "PIP_CONFIG_FILE": "/dev/null"
        }
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise WheelsMissing(f"pip {words[0]} failed: {errors[-1] if errors else 'it gave no reason'}")


def missing_packages() -> list[str]:
    """Return the needed packages that this Python does not have."""
    missing: list[str] = []
    for name in NEEDED:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def prepare_site(folder: Path, wheels: Path = WHEELS) -> Path:
    """Install the wheels into a folder for PYTHONPATH, and return it; a Python that has all packages needs none.

    Where wheels are missing, or are for another Python, they are fetched before.
    """
    if not missing_packages():
        site = folder / "site-unipar"
        site.mkdir(parents=True, exist_ok=True)
        _write_distribution(site)
        return site
    try:
        site = _install_wheels(folder, wheels)
    except WheelsMissing as unfit:
        try:
            fetch_wheels(wheels)
        except WheelsMissing as e:
            raise WheelsMissing(
                f"{unfit}, and others cannot be fetched: {e}\n"
                "run `make gpu-wheels` on a machine with a network (any Python there does for CPython 3.12 on x86-64), "
                "and copy that folder here"
            ) from None
        site = _install_wheels(folder, wheels)
    _write_distribution(site)
    return site


def _install_wheels(folder: Path, wheels: Path) -> Path:
    names = sorted(wheel.name for wheel in wheels.glob("*.whl"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not names:
        raise WheelsMissing(f"{wheels} has no wheels")
    site = folder / f"site-{version}-{hashlib.sha256(repr(names).encode()).hexdigest()[:8]}"
    if not (site / ".whole").exists():
        shutil.rmtree(site, ignore_errors=True)
        words = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--find-links", str(wheels)]
        try:
            _run_pip("install", *words, "--target", str(site), *pinned_versions().values(), offline=True)
        except WheelsMissing as e:
            raise WheelsMissing(f"the wheels in {wheels} do not fit Python {version} here ({e})") from None
        (site / ".whole").touch()
    return site


def _write_distribution(site: Path) -> None:
    """Write unipar's own metadata, through which its backends are found: its code is used where it lies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    folder = site / f"unipar-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: unipar\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(head, encoding="utf-8")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """Fetch the wheels and say how large they are."""
    try:
        wheels = fetch_wheels()
    except WheelsMissing as e:
        print(f"unipar: {e}", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB, in {WHEELS}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
