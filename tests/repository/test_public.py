"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import unipar

NAMES = {
    "BackendNotFound",
    "BackendNotInstalled",
    "Strategy",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Hung",
    "Inconsistent",
    "MatrixOptimizer",
    "NonFinite",
    "OutExists",
    "OutOfMemory",
    "Report",
    "ReportError",
    "Run",
    "Stopped",
    "Task",
    "TaskError",
    "Tracker",
    "UniparError",
    "Unsupported",
    "WorkerFailed",
    "WorldMismatch",
    "__version__",
    "compare",
    "gathered",
    "join",
    "launch",
    "plan",
    "scale",
    "verify",
}


def test_the_names_are_these() -> None:
    """Whoever adds or drops one says so here."""
    assert set(unipar.__all__) == NAMES
    assert set(dir(unipar)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there(name: str) -> None:
    """Each is found where it is said to be, and stays."""
    found = getattr(unipar, name)
    assert found is getattr(unipar, name)
    assert name == "__version__" or found.__name__ == name


def test_every_error_is_public() -> None:
    """Nobody has to import `unipar.errors` to catch one."""
    from unipar import errors

    raised = {n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, errors.UniparError)}
    assert raised <= NAMES


def test_an_unknown_name() -> None:
    """As for any module."""
    with pytest.raises(AttributeError) as e:
        unipar.lunch  # type: ignore[attr-defined]  # noqa: B018 - that is the point
    assert str(e.value) == "module 'unipar' has no attribute 'lunch'"


def test_the_version_is_the_distributions() -> None:
    """Written down once, in pyproject.toml."""
    assert unipar.__version__ == version("unipar")


HEAVY = ("torch", "numpy", "pydantic", "rich", "yaml", "typer", "importlib.metadata")


def loaded(code: str) -> set[str]:
    """Which heavy modules a fresh process has after running `code`."""
    program = f"{code}\nimport sys\nprint('loaded:', *[m for m in {HEAVY!r} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(told.rpartition("loaded:")[2].split())


def test_importing_unipar_imports_nothing_heavy() -> None:
    """Names come when they are used."""
    assert loaded("import unipar") == set()


def test_what_a_script_names_first_imports_no_torch() -> None:
    """Task, launch and Config are cheap until something runs."""
    assert not loaded("from unipar import Task, launch, join, Config, Report, UniparError") & {"torch", "numpy"}


def test_help_imports_nothing_heavy() -> None:
    """`unipar --help` answers at once."""
    code = "import sys; sys.argv = ['unipar', '--help']\nfrom unipar.cli.app import main\n"
    code += "try: main()\nexcept SystemExit: pass"
    assert loaded(code) <= {"typer"}
