"""Horovod's wheel, made here: its released source, compiled as the installed torch was, and proved before it counts.

Its source asks for C++14 while torch's headers want more, so `pip install` has failed since torch 2.1.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from unipar.errors import BackendNotInstalled
from unipar.utils.files import cache_folder, path_with_scripts, whole
from unipar_horovod.run_command import CommandFailed, ShowPercent, run_logged, show_progress
from unipar_horovod.toolchain import (
    BuildFeatures,
    TorchBuild,
    features_asked_for,
    find_features,
    list_missing,
    parallel_jobs,
    query_torch,
    wheel_key,
)

HOROVOD_VERSION = "0.28.1"
HOROVOD_SDIST = f"horovod-{HOROVOD_VERSION}.tar.gz"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCHED_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
CXX_STANDARD_LINE = "set(CMAKE_CXX_STANDARD 14)"
PIP_COMMAND = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Wheel:
    """A wheel in the cache, and how it came there."""

    path: Path
    names: tuple[str, ...]
    how: str


def install_horovod(*, force: bool = False) -> str:
    """Builds what is not in the cache (with `force`, always), installs it and proves it; says what was done."""
    torch = query_torch()
    if (missing := list_missing(torch)) or isinstance(torch, str):
        raise BackendNotInstalled(f"horovod {HOROVOD_VERSION} cannot be built yet; missing: {'; '.join(missing)}")
    log = _cache_subfolder("logs") / f"horovod-{HOROVOD_VERSION}-{os.getpid()}.log"
    keep = False
    try:
        with tempfile.TemporaryDirectory(prefix="unipar-horovod-") as folder:
            return _build_and_install(torch, Path(folder), log, force)
    except BackendNotInstalled:
        keep = True
        raise
    finally:
        if not keep:
            log.unlink(missing_ok=True)


def _build_and_install(torch: TorchBuild, folder: Path, log: Path, force: bool) -> str:
    begun = time.monotonic()
    wanted = find_features(torch, folder / "links")
    if not force and _is_installed() and _works(wanted, log):
        return f"horovod {HOROVOD_VERSION} is installed already: two processes of it summed a tensor over loopback"
    wheel = _get_wheel(torch, wanted, folder, log, force)
    with show_progress("installing horovod"):
        command = [*PIP_COMMAND, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel.path)]
        _run_or_explain(command, log, "pip did not install its wheel")
    _prove_or_uninstall(wheel, log)
    return (
        f"horovod {HOROVOD_VERSION} for torch {torch.version} is installed, with {', '.join(wheel.names)} ({wheel.how}; "
        f"{time.monotonic() - begun:.0f} s): two processes of it summed a tensor over loopback"
    )


def _get_wheel(torch: TorchBuild, wanted: BuildFeatures, folder: Path, log: Path, force: bool) -> Wheel:
    plans = [wanted, features_asked_for(torch, folder / "links")] if wanted.found else [wanted]
    for plan in plans:
        kept = _cache_subfolder("wheels") / wheel_key(HOROVOD_VERSION, torch, plan.names)
        if not force and (found := sorted(kept.glob("*.whl"))):
            return Wheel(found[0], plan.names, "a wheel from the cache")
        try:
            how = "built here" if plan is wanted else f"built here, as the build with {', '.join(wanted.names)} failed"
            return Wheel(_build_wheel(torch, plan, folder, kept, log), plan.names, how)
        except BackendNotInstalled:
            if plan is plans[-1]:
                raise
    raise AssertionError("unreachable")


def _build_wheel(torch: TorchBuild, plan: BuildFeatures, folder: Path, kept: Path, log: Path) -> Path:
    """From the released source to a wheel in `kept`."""
    source = _unpack(_fetch_source(folder, log), folder / f"source-{len(plan.names)}")
    patch_cxx_standard(source, torch.standard)
    made = folder / f"made-{len(plan.names)}"
    with show_progress(f"building horovod {HOROVOD_VERSION} for torch {torch.version}") as say:
        _run_or_explain(
            [
                *PIP_COMMAND,
                "-v",
                "wheel",
                "--no-deps",
                "--no-build-isolation",
                "--no-cache-dir",
                "-w",
                str(made),
                str(source),
            ],
            log,
            f"it could not be built against torch {torch.version}",
            env=build_environment(plan),
            say=say,
        )
    (wheel,) = made.glob("*.whl")
    kept.mkdir(parents=True, exist_ok=True)
    with whole(kept / wheel.name) as partial:
        shutil.move(wheel, partial)
    return kept / wheel.name


def build_environment(plan: BuildFeatures) -> dict[str, str]:
    """The build's: torch and Gloo always, `plan` besides."""
    return os.environ | {
        "PATH": path_with_scripts(),
        "MAKEFLAGS": f"-j{parallel_jobs()}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the age that the bundled Gloo says
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        **plan.variables,
    }


def _fetch_source(folder: Path, log: Path) -> Path:
    """The released archive, its checksum checked: by pip before it runs any of it, and here."""
    kept = _cache_subfolder("sources") / HOROVOD_SDIST
    if not kept.exists():
        wanted = folder / "requirements.txt"
        wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n", encoding="utf-8")
        command = [
            *PIP_COMMAND,
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--require-hashes",
        ]
        with show_progress(f"fetching {HOROVOD_SDIST}"):
            _run_or_explain(
                [*command, "-d", str(folder), "-r", str(wanted)],
                log,
                f"its source could not be fetched (it may be put by hand at {kept}, sha256 {HOROVOD_SHA256})",
            )
        with whole(kept) as partial:
            shutil.move(folder / HOROVOD_SDIST, partial)
    check_sha256(kept)
    return kept


def check_sha256(archive: Path) -> None:
    """Nothing of another archive is unpacked."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != HOROVOD_SHA256:
        raise BackendNotInstalled(
            f"{archive} is not horovod {HOROVOD_VERSION} as released: its sha256 is {found}, not {HOROVOD_SHA256}; remove it, try again"
        )


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 has none yet
        tar.extractall(folder)
    return folder / f"horovod-{HOROVOD_VERSION}"


def patch_cxx_standard(source: Path, standard: int) -> None:
    """Both places that ask for C++14 ask for what torch was compiled with."""
    for name in PATCHED_FILES:
        file = source / name
        text = file.read_text("utf-8")
        if text.count(CXX_STANDARD_LINE) != 1:
            raise BackendNotInstalled(
                f"{name} of horovod {HOROVOD_VERSION} does not hold {CXX_STANDARD_LINE!r} once; this is another source"
            )
        file.write_text(
            text.replace(CXX_STANDARD_LINE, CXX_STANDARD_LINE.replace("14", str(standard))), encoding="utf-8"
        )


def _is_installed() -> bool:
    try:
        return metadata.version("horovod") == HOROVOD_VERSION
    except metadata.PackageNotFoundError:
        return False


def _works(wanted: BuildFeatures, log: Path) -> bool:
    """Whether what is installed runs with this torch, and has what is wanted."""
    try:
        built = json.loads(_run_self_test(log))
    except CommandFailed:
        return False
    return all(built[name] for name in wanted.names)


def _run_self_test(log: Path) -> str:
    with show_progress("two processes sum a tensor"):
        return run_logged(
            [sys.executable, "-P", "-m", "unipar_horovod.self_test"], log=log, env=without_horovod_variables(os.environ)
        )


def without_horovod_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` less what a launcher or a user says to Horovod: the proof is a world of its own."""
    return {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}


def _prove_or_uninstall(wheel: Wheel, log: Path) -> None:
    """What does not run is not left behind, neither installed nor in the cache."""
    try:
        _run_self_test(log)
    except CommandFailed as e:
        wheel.path.unlink()
        _run_or_explain(
            [*PIP_COMMAND, "uninstall", "-y", "horovod"], log, "its wheel does not run, and pip did not uninstall it"
        )
        raise BackendNotInstalled(
            f"horovod {HOROVOD_VERSION} was installed, did not run, and was uninstalled again: {e} (the whole log: {log})"
        ) from None


def _run_or_explain(
    command: Sequence[str], log: Path, trouble: str, env: Mapping[str, str] = os.environ, say: ShowPercent | None = None
) -> None:
    try:
        run_logged(command, log=log, env=env, say=say)
    except CommandFailed as e:
        raise BackendNotInstalled(
            f"horovod {HOROVOD_VERSION} was not installed: {trouble}: {e} (the whole log: {log})"
        ) from None


def _cache_subfolder(part: str) -> Path:
    folder = cache_folder() / part
    folder.mkdir(parents=True, exist_ok=True)
    return folder
