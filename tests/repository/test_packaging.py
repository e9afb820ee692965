"""What is shipped: the wheel is built and looked into, as an editable install hides a bad one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Generator
from email.message import Message
from email.parser import Parser
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TRACKERS = {"tensorboard", "wandb", "mlflow"}
EXTRAS = {
    "accelerate",
    "all",
    "deepspeed",
    "examples",
    "horovod",
    "notebook",
    "remote",
    "report",
    "torchao",
    "weights",
} | TRACKERS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Generator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as opened:
        yield opened


@pytest.fixture(scope="module")
def about(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_what_is_shipped_cites_no_page(wheel: zipfile.ZipFile) -> None:
    """A wheel holds no docs/: no string of its code names a file there."""
    cited = [
        f"{name}:{node.lineno}"
        for name in wheel.namelist()
        if name.endswith(".py")
        for node in ast.walk(ast.parse(wheel.read(name)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\bdocs/\w", node.value)
    ]
    assert cited == []


def test_the_wheel_holds_both_roots(wheel: zipfile.ZipFile) -> None:
    """unipar and each backend lie side by side, as they are imported, with all their files and nothing else."""
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in inside} == {
        "unipar",
        "unipar_accelerate",
        "unipar_deepspeed",
        "unipar_horovod",
        "unipar_mesh",
        "unipar_native",
    }
    here = {
        str(file.relative_to(root))
        for root, folder in ((ROOT, "unipar"), (ROOT / "backends", "."))
        for file in (root / folder).rglob("*.py")
    }
    assert {name for name in inside if name.endswith(".py")} == here


def test_each_root_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    """A py.typed in each, so that a user's type checker reads our types."""
    roots = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert {f"{root}/py.typed" for root in roots} <= set(wheel.namelist())


def test_the_page_s_style_is_inside(wheel: zipfile.ZipFile) -> None:
    """report.html is made with it."""
    assert wheel.read("unipar/report/html/page.css") == (ROOT / "unipar/report/html/page.css").read_bytes()


def test_the_extras(about: Message) -> None:
    """By name, and none asks for horovod: its source on the index does not build."""
    assert set(about.get_all("Provides-Extra", [])) == EXTRAS
    assert [line for line in about.get_all("Requires-Dist", []) if line.startswith("horovod")] == []
    assert "torch>=2.11" in about.get_all("Requires-Dist", [])


def test_all_is_all() -> None:
    """The extra `all` names each other one."""
    (text,) = PROJECT["project"]["optional-dependencies"]["all"]
    assert set(text.removeprefix("unipar[").removesuffix("]").split(",")) == EXTRAS - {"all"}


def test_our_trackers_are_entry_points() -> None:
    """Found in the same way as anyone's."""
    shipped = PROJECT["project"]["entry-points"]["unipar.trackers"]
    assert set(shipped) == TRACKERS
    assert shipped.items() <= {point.name: point.value for point in entry_points(group="unipar.trackers")}.items()


def test_the_licence_is_inside(wheel: zipfile.ZipFile, about: Message) -> None:
    """The text, and its name in the metadata."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert about["License-Expression"] == "MIT"
    assert wheel.read(name).decode().startswith("MIT License\n")


def test_the_command_and_the_backends_are_found(wheel: zipfile.ZipFile) -> None:
    """Ours are entry points like anyone's; an install older than pyproject.toml lacks the new ones."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    text = wheel.read(name).decode()
    assert "unipar = unipar.cli.app:main" in text
    shipped = PROJECT["project"]["entry-points"]["unipar.backends"]
    assert set(shipped) == {"single", "native", "deepspeed", "horovod", "accelerate"}
    assert shipped.items() <= {point.name: point.value for point in entry_points(group="unipar.backends")}.items()


def test_constraints_are_names_and_versions() -> None:
    """Each line after the first is `name==version`, sorted; torch has no local tag, so that a CPU build fits."""
    first, *lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert first.startswith("# ")
    assert all(line.count("==") == 1 and not set(line) & set(" /@+;#") for line in lines)
    assert any(line.startswith("torch==") for line in lines)
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0].lower())


def test_what_is_installed_is_constrained() -> None:
    """Every distribution that the project or its groups ask for has a version in constraints.txt."""
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:]
    }
    extras = {name: extra for name, extra in PROJECT["project"]["optional-dependencies"].items() if name != "all"}
    lists = [PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"].values(), *extras.values()]
    asked = [name for names in lists for name in names]
    names = {re.split(r"[\[<>=]", name)[0].lower().replace("-", "_") for name in asked}
    assert names - {name.replace("-", "_") for name in pinned} == set()
