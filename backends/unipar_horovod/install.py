"""Build and installation of Horovod: its released source, compiled for the installed torch, and tested afterwards.

Horovod's source asks for C++14, but torch's headers need a later standard: `pip install` fails since torch 2.1.
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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from unipar.errors import BackendNotInstalled
from unipar.utils.files import cache_folder, path_with_scripts, whole
from unipar_horovod.recipe import prepare_source, recipe_key
from unipar_horovod.run_command import CommandFailed, ShowPercent, count_finished, run_logged, show_progress
from unipar_horovod.toolchain import (
    HOROVOD_VERSION,
    BuildFeatures,
    TorchBuild,
    features_asked_for,
    find_features,
    list_missing,
    parallel_jobs,
    query_torch,
    wheel_key,
)

HOROVOD_SDIST = f"horovod-{HOROVOD_VERSION}.tar.gz"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PIP_COMMAND = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Wheel:
    """Wheel in the cache."""

    path: Path
    names: tuple[str, ...]
    """Features that the wheel was built with."""

    how: str
    """Origin of the wheel, for the report: built now, or from the cache."""

    notes: tuple[str, ...] = ()
    """Sentences about what it lacks."""


def install_horovod(*, force: bool = False) -> str:
    """Build the wheel if the cache has none (with `force`, always), install and test it; return what was done."""
    torch = query_torch()
    if (missing := list_missing(torch)) or isinstance(torch, str):
        raise BackendNotInstalled(
            f"horovod {HOROVOD_VERSION} cannot be built yet; install what is missing: {'; '.join(missing)}"
        )
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
        return f"horovod {HOROVOD_VERSION} is installed already: two processes summed a tensor with it over loopback"
    wheel = _install_first_that_works(torch, wanted, folder, log, force)
    notes = "".join(f"; {note}" for note in wheel.notes)
    return (
        f"horovod {HOROVOD_VERSION} for torch {torch.version} is installed, with {', '.join(wheel.names)} "
        f"({wheel.how}; {time.monotonic() - begun:.0f} s){notes}: two processes summed a tensor with it over loopback"
    )


def _install_first_that_works(torch: TorchBuild, wanted: BuildFeatures, folder: Path, log: Path, force: bool) -> Wheel:
    """Install and test Horovod with all that was found; where that fails, with what was asked for alone."""
    plans = [wanted, features_asked_for(torch, folder / "links")] if wanted.found else [wanted]
    for plan in plans:
        try:
            wheel = _get_wheel(torch, plan, folder, log, force)
            with show_progress("installing horovod"):
                command = [*PIP_COMMAND, "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel.path)]
                _run_or_explain(command, log, "pip did not install its wheel")
            _prove_or_uninstall(wheel, log)
        except BackendNotInstalled as e:
            if plan is plans[-1]:
                raise
            plans[-1] = replace(plans[-1], notes=(note_of_failure(wanted, plans[-1], str(e)),))
        else:
            return wheel
    raise AssertionError("unreachable")


def note_of_failure(wanted: BuildFeatures, left: BuildFeatures, why: str) -> str:
    """Return the sentence that says what the installed build lacks, as the wanted one failed."""
    lost = [name for name in wanted.names if name not in left.names]
    tensors = "for CPU tensors only, " if wanted.cuda and not left.cuda else ""
    return f"{tensors}without {' and '.join(lost)}, as the build with {', '.join(wanted.names)} failed: {why}"


def _get_wheel(torch: TorchBuild, plan: BuildFeatures, folder: Path, log: Path, force: bool) -> Wheel:
    cached = _cache_subfolder("wheels") / wheel_key(HOROVOD_VERSION, torch, plan.names, recipe_key())
    if not force and (wheels := sorted(cached.glob("*.whl"))):
        return Wheel(wheels[0], plan.names, "a wheel from the cache", plan.notes)
    return Wheel(_build_wheel(torch, plan, folder, cached, log), plan.names, "built here", plan.notes)


def _build_wheel(torch: TorchBuild, plan: BuildFeatures, folder: Path, cached: Path, log: Path) -> Path:
    """Build a wheel from the released source, and return its path in the folder `cached`."""
    source = unpack(fetch_source(folder, log), folder / f"source-{len(plan.names)}")
    prepare_source(source, torch, plan)
    built = folder / f"built-{len(plan.names)}"
    with show_progress(f"building horovod {HOROVOD_VERSION} for torch {torch.version}") as show:
        run_build(source, built, plan, log, count_finished(show, parallel_jobs()))
    (wheel,) = built.glob("*.whl")
    cached.mkdir(parents=True, exist_ok=True)
    with whole(cached / wheel.name) as partial:
        shutil.move(wheel, partial)
    return cached / wheel.name


def run_build(source: Path, built: Path, plan: BuildFeatures, log: Path, say: ShowPercent | None = None) -> None:
    """Compile `source` into a wheel in the folder `built`."""
    command = [*PIP_COMMAND, "-v", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    trouble = "it could not be built for this torch"
    _run_or_explain([*command, "-w", str(built), str(source)], log, trouble, env=build_environment(plan), say=say)


def build_environment(plan: BuildFeatures) -> dict[str, str]:
    """Return the environment of the build: torch and Gloo always, and the features of `plan`."""
    return os.environ | {
        "PATH": path_with_scripts(),
        "MAKEFLAGS": f"-j{parallel_jobs()}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the old version that the bundled Gloo asks for
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        **plan.variables,
    }


def fetch_source(folder: Path, log: Path) -> Path:
    """Return the released archive; pip checks its checksum before it runs any of it, and so does this function."""
    archive = _cache_subfolder("sources") / HOROVOD_SDIST
    if not archive.exists():
        requirements = folder / "requirements.txt"
        requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n", encoding="utf-8")
        command = [*PIP_COMMAND, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        with show_progress(f"fetching {HOROVOD_SDIST}"):
            _run_or_explain(
                [*command, "--require-hashes", "-d", str(folder), "-r", str(requirements)],
                log,
                f"its source could not be fetched (you may put it at {archive} by hand, sha256 {HOROVOD_SHA256})",
            )
        with whole(archive) as partial:
            shutil.move(folder / HOROVOD_SDIST, partial)
    check_sha256(archive)
    return archive


def check_sha256(archive: Path) -> None:
    """Raise BackendNotInstalled where the archive is not the released one, before any of it is unpacked."""
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    if checksum != HOROVOD_SHA256:
        raise BackendNotInstalled(
            f"{archive} is not horovod {HOROVOD_VERSION} as released: its sha256 is {checksum}, "
            f"not {HOROVOD_SHA256}; remove it, try again"
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the archive in `folder`, and return the folder of the source."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 has none yet
        tar.extractall(folder)
    return folder / f"horovod-{HOROVOD_VERSION}"


def _is_installed() -> bool:
    try:
        return metadata.version("horovod") == HOROVOD_VERSION
    except metadata.PackageNotFoundError:
        return False


def _works(wanted: BuildFeatures, log: Path) -> bool:
    """Return whether the installed Horovod runs with this torch, and has the wanted features."""
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
    """Return `environ` without Horovod's variables: those of a launcher or a user must not reach the self-test."""
    return {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}


def _prove_or_uninstall(wheel: Wheel, log: Path) -> None:
    """Run the self-test; where it fails, uninstall Horovod, remove its wheel from the cache, and raise."""
    try:
        _run_self_test(log)
    except CommandFailed as e:
        wheel.path.unlink()
        _run_or_explain(
            [*PIP_COMMAND, "uninstall", "-y", "horovod"], log, "its wheel does not run, and pip did not uninstall it"
        )
        raise BackendNotInstalled(
            f"horovod {HOROVOD_VERSION} was installed, failed its self-test, and was uninstalled again: {e}; "
            f"`unipar install horovod --force` builds it anew (the full log: {log})"
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
