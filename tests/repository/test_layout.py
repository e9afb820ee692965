"""The layout itself: who may import whom, who may name what, and what each file begins with."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.floors import FLOORS
from tools.layout import Layout, circles, height

ROOT = Path(__file__).parents[2]
FOLDERS = ("unipar", "backends", "examples", "benchmarks", "tools", "tests")
LIBRARIES = ("deepspeed", "horovod", "accelerate")
BACKENDS = ("unipar_mesh", "unipar_native", "unipar_deepspeed", "unipar_horovod", "unipar_accelerate")
MAY_REUSE = {
    "unipar_accelerate": {"unipar_mesh", "unipar_deepspeed"},
    "unipar_deepspeed": {"unipar_mesh"},
    "unipar_native": {"unipar_mesh"},
}
"""Backends that unipar splits models for use the mesh; Accelerate wraps DeepSpeed."""

HELP = {
    ROOT / "unipar/cli/app.py",
    ROOT / "unipar/config/foreign_words.py",
    *(ROOT / "unipar/cli/commands").rglob("*.py"),
}
"""Files in which a text may name a library: `--help` teaches by example, an answer says what to write."""

PACKAGES = sorted(package for floor in FLOORS[1:] for package in floor)

BEFORE_TORCH = (
    "unipar",
    "unipar.__main__",
    "unipar.cli.app",
    *(f"unipar.{package}" for package in ("config", "task", "backend")),
)
"""Where `unipar check` starts, besides the commands, the packages in DOORS and the backends' descriptions."""

ROOTS = str(ROOT / "unipar")
"""The folder of errors.py, below all packages, and of the public names, above all."""

TRAINS = {"unipar.comparison.comparison_worker", "unipar.comparison.witness"}
"""Modules in DOORS that run in a training process."""

DOORS = (
    "unipar.cli",
    "unipar.calibration",
    "unipar.jobs",
    "unipar.launcher",
    "unipar.comparison",
    "unipar.conversion",
    "unipar.report",
)
"""Packages whose modules run before a process that trains."""


@cache
def layout() -> Layout:
    """Return the modules: not at import, which every process of the tests would wait for."""
    return Layout(ROOT)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Syntax trees are millions of objects, among which nothing is garbage: they go with the last of these tests."""
    gc.disable()
    yield
    layout.cache_clear()
    parsed.cache_clear()
    gc.enable()


def files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def statements(tree: ast.AST, *, functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield import statements that run: not those for type checkers, and those inside functions only if asked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue  # expressions hold none
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(node, functions=functions)


def imported(tree: ast.AST, *, functions: bool = True) -> set[str]:
    """Return every name that an import statement could load: `from a import b` is both a and a.b."""
    found: set[str] = set()
    for node in statements(tree, functions=functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, "imports are absolute"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_imports_point_down() -> None:
    """A package imports from lower floors alone: type-checking imports and those inside functions count."""
    assert layout().upward() == []


def test_every_package_stands_on_a_floor() -> None:
    """The floors name each folder of unipar/ once, and none that is not there."""
    assert sorted(file.parent.name for file in (ROOT / "unipar").glob("*/__init__.py")) == PACKAGES
    assert len(PACKAGES) == len(set(PACKAGES)) == 27


def test_the_root_holds_four_files() -> None:
    """Everything else lies in a package."""
    assert sorted(f.name for f in (ROOT / "unipar").iterdir() if f.is_file()) == [
        "__init__.py",
        "__main__.py",
        "errors.py",
        "py.typed",
    ]
    assert layout().imports["unipar.errors"] == set()


def test_no_import_circle() -> None:
    """Neither files, nor folders, nor packages import one another in a circle; type-checking imports count."""
    assert layout().circles() == []
    assert circles(layout().rooms()) == []
    folders: dict[str, set[str]] = {}
    core = {name: others for name, others in layout().imports.items() if name.startswith("unipar.")}
    for name, others in core.items():
        if (folder := str(layout().files[name].parent)) != ROOTS:
            parents = {str(layout().files[other].parent) for other in others if other.startswith("unipar.")}
            folders.setdefault(folder, set()).update(parents - {folder, ROOTS})
    assert circles(folders) == []


def test_a_circle_is_found() -> None:
    """The measure itself: a circle of two, its floors counted as one."""
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert circles(imports) == [["b", "c"]]
    assert height(imports) == 3


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_a_docstring_of_one_sentence(package: str) -> None:
    """`__init__.py` says what the package is, and imports nothing, or hands names on."""
    tree = ast.parse((ROOT / "unipar" / package / "__init__.py").read_text("utf-8"))
    assert ast.get_docstring(tree)
    assert [node for node in tree.body[1:] if not isinstance(node, ast.ImportFrom)] == []


def test_a_module_imports_its_neighbours_not_its_face() -> None:
    """Inside a package nothing is imported through its `__init__.py`: that would be a circle."""
    guilty = [
        f"{module} imports {other}"
        for module, others in layout().imports.items()
        for other in others
        if other != "unipar" and module.startswith(f"{other}.") and layout().files[other].name == "__init__.py"
    ]
    assert [line for line in guilty if "unipar_" not in line] == []


def test_a_file_says_first_what_it_is() -> None:
    """Each file begins with a docstring."""
    texts = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files(*FOLDERS)}
    assert len(texts) > 500
    assert [file for file, text in texts.items() if not text.startswith('"""')] == []


SHARED = {"backend", "join", "options_of", "script", "read", "KNOWN", "LIBRARY"}
"""Names that every backend defines."""


def test_a_public_name_stands_for_one_thing() -> None:
    """No two files define the same public name; commands have the names of what they call."""
    homes: Counter[str] = Counter()
    for name, tree in layout().trees.items():
        if name.startswith("unipar.cli.commands"):
            continue
        homes.update(defined(tree))
    assert {name for name, times in homes.items() if times > 1 and not name.startswith("_")} - SHARED == set()


def defined(tree: ast.Module) -> set[str]:
    """Return names that a module defines at its top."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


UNSAID = re.compile(r"(What|Of|Where|By|Nothing|None:|Whose|That|It|Its|So|Who|How|As|From|For|To)\b")
"""First words of a docstring that does not say what the thing is."""


def test_docstrings_say_what_the_thing_is() -> None:
    """A first line is an order ("Return ...") or a noun phrase."""
    guilty: list[str] = []
    for file in files("unipar", "backends", "benchmarks", "tools"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and UNSAID.match(text):
                    name = getattr(node, "name", "the file")
                    guilty.append(f"{file.relative_to(ROOT)}, {name}: {text.splitlines()[0]}")
    assert guilty == []


def test_tests_mirror_the_packages() -> None:
    """tests/ has a folder for each package that has tests, and a few that stand for themselves."""
    own = {"backends", "repository", "conformance", "corpus", "chaos", "emulated", "support"}
    found = {file.parent.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").glob("*/**/test_*.py")}
    assert found - own <= set(PACKAGES)
    assert list((ROOT / "tests").glob("test_*.py")) == []


def test_tests_import_no_tests() -> None:
    """What several tests use lies in tests/support."""
    guilty = {
        str(file.relative_to(ROOT)): sorted(names)
        for file in files("tests")
        if (names := {n for n in imported(parsed(file)) if re.match(r"tests\.(\w+\.)*test_", n)})
    }
    assert guilty == {}


def test_each_helper_of_tests_is_listed() -> None:
    """tests/support/README.md names each file and folder there once, and none that is not there."""
    folder = ROOT / "tests" / "support"
    there = {f"{entry.name}{'/' * entry.is_dir()}" for entry in folder.iterdir() if entry.name != "__pycache__"}
    listed = re.findall(r"`(\w+(?:\.py|/))`", (folder / "README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(there - {"README.md"})


def named_libraries(file: Path) -> Iterator[str]:
    """Yield a line for each place in a file that names a backend's library; docstrings and help texts may."""
    tree = parsed(file)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if not isinstance(value, str) or not any(name in value.lower() for name in LIBRARIES):
                continue
            if id(node) in docs or (isinstance(node, ast.Constant) and file in HELP):
                continue
            yield f"{file.relative_to(ROOT)}, line {getattr(node, 'lineno', '?')}: {value}"


def test_the_core_names_no_library() -> None:
    """No identifier, import or text in unipar/ holds a backend's library."""
    assert [line for file in files("unipar") for line in named_libraries(file)] == []


def test_the_core_imports_no_backend() -> None:
    """unipar knows backends by their entry points alone."""
    core = {module for module in layout().trees if module.partition(".")[0] == "unipar"}
    assert {module for module in core if top(imported(layout().trees[module])) & {*BACKENDS, *LIBRARIES}} == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fence_between_backends(backend: str) -> None:
    """A backend imports its own parts and library, and floors 1 to 6; two may reuse parts of others (MAY_REUSE)."""
    mine = {module for module in layout().trees if module.partition(".")[0] == backend}
    assert mine
    names = {name for module in mine for name in imported(layout().trees[module])}
    known = top(names)
    assert (known & set(BACKENDS)) - {backend} <= MAY_REUSE.get(backend, set())
    assert known & set(LIBRARIES) <= {backend.removeprefix("unipar_")}
    lower = set[str]().union(*FLOORS[:7])
    assert {name.split(".")[1] for name in names if name.startswith("unipar.")} <= lower


def test_nobody_imports_the_folder_backends() -> None:
    """`import backends.unipar_x` would load a second, unequal copy of every class."""
    guilty = [file for file in files(*FOLDERS) if "backends" in top(imported(parsed(file)))]
    assert guilty == []


def before_torch() -> set[str]:
    """Return all modules that are loaded where no training process runs: commands, DOORS, backends' descriptions."""
    reached: set[str] = set()
    waiting = [m for m in layout().trees if m in (*BEFORE_TORCH, *BACKENDS) or m.startswith(DOORS)]
    waiting = [m for m in waiting if m not in TRAINS]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            names = imported(layout().trees[module], functions=False)
            waiting += [name for name in names if name in layout().trees]
    return reached


def test_no_torch_before_training() -> None:
    """Commands, configs and descriptions load torch, numpy, rich and the libraries only where a function needs them."""
    heavy = {"torch", "numpy", "rich", *LIBRARIES}
    found = {m: sorted(top(imported(layout().trees[m], functions=False)) & heavy) for m in before_torch()}
    assert {m: names for m, names in found.items() if names} == {}


def test_no_torch_in_a_process_that_checks() -> None:
    """What the rule above promises, seen in a process: descriptions of all backends, and neither torch nor numpy."""
    code = """
import sys
from unipar.backend.offered_strategies import strategies_of_backend
from unipar.backend.registry import backend_names, find_backend
import unipar.config.config_source
assert all(strategies_of_backend(find_backend(name)) for name in backend_names())
print(sorted({"torch", "numpy", "rich", "deepspeed", "horovod", "accelerate"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_one_file_names_cuda() -> None:
    """What speaks of a device goes through unipar/distributed/device.py, or through torch's module of that device."""
    guilty = [
        module
        for module, tree in layout().trees.items()
        if "torch" in top(imported(tree, functions=True))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch"
    ]
    assert set(guilty) == {"unipar.distributed.device"}


def test_no_place_of_one_machine() -> None:
    """Nothing in the repository names an address to install from: what is installed is said by name and version."""
    places = re.compile(r"--(extra-)?index-url|--find-links|https?://[\w.]*(pypi|pytorch)\.")
    texts = [ROOT / name for name in ("Makefile", "constraints.txt", "pyproject.toml", ".ci/run", ".ci/needs")]
    assert [
        str(file) for file in (*texts, *files("unipar", "backends")) if places.search(file.read_text("utf-8"))
    ] == []
