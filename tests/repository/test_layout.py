"""The house itself: who may import whom, who may name what, and how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("unipar", "backends", "examples", "benchmarks", "tests")
LIBRARIES = ("deepspeed", "horovod", "accelerate")
BACKENDS = ("unipar_native", "unipar_deepspeed", "unipar_horovod", "unipar_accelerate")
MAY_REUSE = {"unipar_accelerate": {"unipar_native", "unipar_deepspeed"}}
HELP = {ROOT / "unipar/cli.py", ROOT / "unipar/flags.py"}
"""Where names may stand in a text: `--help` teaches by example."""

BEFORE_TORCH = (
    "unipar",
    "unipar.__main__",
    "unipar.cli.app",
    "unipar.config.source",
    "unipar.backend.registry",
    "unipar.backend.resources",
    "unipar.task.inspection",
)
"""What `unipar check` starts from, besides the verbs and the backends' descriptions."""

TRAINS = {"unipar.comparison.worker"}
"""Parts of verbs that run in a training process."""


def files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def named(file: Path) -> str:
    """backends/unipar_x/engine.py is the module unipar_x.engine."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PRODUCT = {named(file): ast.parse(file.read_text("utf-8"), str(file)) for file in files("unipar", "backends")}


def statements(tree: ast.AST, *, functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run: those for type checkers are left out, those in functions if asked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(node, functions=functions)


def imported(tree: ast.AST, *, functions: bool = True) -> set[str]:
    """Every name that an import statement could load: `from a import b` is both a and a.b."""
    found: set[str] = set()
    for node in statements(tree, functions=functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, "imports are absolute"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def edges(module: str, *, functions: bool = True) -> set[str]:
    """Whom a module imports; a backend's description reaches its own parts when it is used, and is left out there."""
    functions = functions and module not in BACKENDS
    return {name for name in imported(PRODUCT[module], functions=functions) if name in PRODUCT and name != module}


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_no_import_cycle() -> None:
    """Imports point one way, those inside functions too."""
    white, path = set(PRODUCT), list[str]()

    def walk(module: str) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in white:
            path.append(module)
            for other in sorted(edges(module)):
                walk(other)
            path.pop()
            white.discard(module)

    for module in sorted(PRODUCT):
        walk(module)


def test_imports_point_down() -> None:
    """Only the command line and the public names know the verbs; errors know nobody, config its parts."""
    above = {m for m in PRODUCT if any(e.startswith("unipar.verbs") for e in edges(m)) and "unipar.verbs" not in m}
    assert above <= {"unipar", "unipar.cli.app"}
    assert edges("unipar.errors") == set()
    assert edges("unipar.config.config") == {
        "unipar.errors",
        "unipar.config.sections.model",
        "unipar.config.sections.optimizer",
    }


@pytest.mark.parametrize("file", files(*FOLDERS), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_is_one_room(file: Path) -> None:
    """It says first what it is, and ends before line 400."""
    text = file.read_text("utf-8")
    assert text.startswith('"""')
    assert text.count("\n") <= 400


@pytest.mark.parametrize("file", files("unipar"), ids=lambda file: file.name)
def test_the_core_names_no_library(file: Path) -> None:
    """No identifier, import or text in unipar/ holds a backend's library; docstrings and help texts may."""
    tree = ast.parse(file.read_text("utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    guilty: list[str] = []
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if not isinstance(value, str) or not any(name in value.lower() for name in LIBRARIES):
                continue
            if id(node) in docs or (isinstance(node, ast.Constant) and file in HELP):
                continue
            guilty.append(f"line {getattr(node, 'lineno', '?')}: {value}")
    assert guilty == []


def test_the_core_imports_no_backend() -> None:
    """unipar knows backends by their entry points alone."""
    core = {module for module in PRODUCT if module.partition(".")[0] == "unipar"}
    assert {module for module in core if top(imported(PRODUCT[module])) & {*BACKENDS, *LIBRARIES}} == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fence_between_backends(backend: str) -> None:
    """A backend imports its own parts and library; unipar_accelerate alone may reuse two others."""
    mine = {module for module in PRODUCT if module.partition(".")[0] == backend}
    assert mine
    known = top({name for module in mine for name in imported(PRODUCT[module])})
    assert (known & set(BACKENDS)) - {backend} <= MAY_REUSE.get(backend, set())
    assert known & set(LIBRARIES) <= {backend.removeprefix("unipar_")}


def test_nobody_imports_the_folder_backends() -> None:
    """`import backends.unipar_x` would load a second, unequal copy of every class."""
    guilty = [file for file in files(*FOLDERS) if "backends" in top(imported(ast.parse(file.read_text("utf-8"))))]
    assert guilty == []


def before_torch() -> set[str]:
    """All that is loaded where no training process runs: the commands, and each backend's description."""
    reached: set[str] = set()
    waiting = [m for m in PRODUCT if m in (*BEFORE_TORCH, *BACKENDS) or m.startswith("unipar.verbs.")]
    waiting = [m for m in waiting if m not in TRAINS]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += edges(module, functions=False)
    return reached


def test_no_torch_before_training() -> None:
    """Commands, configs and descriptions load torch, numpy, rich and the libraries only where a function needs them."""
    heavy = {"torch", "numpy", "rich", *LIBRARIES}
    found = {m: sorted(top(imported(PRODUCT[m], functions=False)) & heavy) for m in before_torch()}
    assert {m: names for m, names in found.items() if names} == {}


def test_no_torch_in_a_process_that_checks() -> None:
    """What the rule above promises, seen in a process: descriptions of all backends, and neither torch nor numpy."""
    code = """
import sys
from unipar.registry import cells, find, names
import unipar.source
assert all(cells(find(name)) for name in names())
print(sorted({"torch", "numpy", "rich", "deepspeed", "horovod", "accelerate"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_no_place_of_one_machine() -> None:
    """Nothing in the repository names an address to install from: what is installed is said by name and version."""
    places = re.compile(r"--(extra-)?index-url|--find-links|https?://[\w.]*(pypi|pytorch)\.")
    texts = [ROOT / name for name in ("Makefile", "constraints.txt", "pyproject.toml", ".ci/run", ".ci/needs")]
    assert [
        str(file) for file in (*texts, *files("unipar", "backends")) if places.search(file.read_text("utf-8"))
    ] == []
