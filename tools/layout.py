"""The shape of `unipar/`, measured from its imports: packages, floors, circles, sizes. `make layout` prints it.

Imports for type checkers count, and so do those inside functions. `make layout ARGS=--picture` prints the packages by
floor, as CONTRIBUTING shows them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from tools.floors import BACKENDS, FLOORS

ROOT = Path(__file__).parents[1]


class Layout:
    """Modules below one or more source folders, and which of them import which."""

    def __init__(self, root: Path, folders: Iterable[str] = ("unipar", "backends")) -> None:
        self.root = root
        self.files = {
            module_of(file, root): file for folder in folders for file in sorted((root / folder).rglob("*.py"))
        }
        self.trees = {name: ast.parse(file.read_text("utf-8"), str(file)) for name, file in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Imported modules of these folders, by module."""
        return {
            name: {
                module
                for module in self._resolved(imported_names(tree, functions=not self._is_description(name)))
                if module != name
            }
            for name, tree in self.trees.items()
        }

    def _is_description(self, name: str) -> bool:
        """Return whether a module is a backend's description, whose functions import its own engines when called."""
        return not name.startswith("unipar.") and self.files[name].name == "__init__.py"

    def _resolved(self, names: Iterable[str]) -> set[str]:
        """Return the modules behind names: `from a import b` means a.b if that is a module, else a."""
        found = {name for name in names if name in self.files}
        return found | {name.rpartition(".")[0] for name in names if name not in self.files} & self.files.keys()

    def circles(self) -> list[list[str]]:
        """Return import circles between modules; each is sorted."""
        return circles(self.imports)

    def rooms(self) -> dict[str, set[str]]:
        """Return imports between the entries of `unipar/`: its packages, and modules that lie in it."""
        found: dict[str, set[str]] = {}
        for module, imports in self.imports.items():
            if (room := room_of(module)) is not None:
                others = {room_of(other) for other in imports} - {room, None}
                found.setdefault(room, set()).update(other for other in others if other is not None)
        return found

    def upward(self) -> list[str]:
        """Return imports that do not point to a lower floor, each as a sentence."""
        floor = {package: number for number, packages in enumerate(FLOORS) for package in packages}
        found: list[str] = []
        for module, imports in sorted(self.imports.items()):
            mine = room_of(module)
            for other in sorted(imports):
                theirs = room_of(other)
                if mine is None or theirs is None or mine == theirs:
                    continue
                if floor.get(theirs, 99) >= floor.get(mine, -1):
                    found.append(f"{module} (floor {floor.get(mine)}) imports {other} (floor {floor.get(theirs)})")
        return found

    def folders(self) -> Counter[str]:
        """Return the number of files in each folder, without `__init__.py`."""
        return Counter(
            str(file.parent.relative_to(self.root)) for file in self.files.values() if file.name != "__init__.py"
        )

    def lines(self) -> dict[str, int]:
        """Return the number of lines of each module."""
        return {name: file.read_text("utf-8").count("\n") for name, file in self.files.items()}


def module_of(file: Path, root: Path) -> str:
    """Return a file's module name: backends/unipar_x/engine.py is unipar_x.engine."""
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[1:] if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """Return the entry of `unipar/` in which a module lies; None for the root itself and for backends."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "unipar" and rest not in ("", "__main__") else None


def imported_names(tree: ast.AST, *, functions: bool = True) -> set[str]:
    """Return every name that an import statement could load: `from a import b` means a.b."""
    found: set[str] = set()
    functions_of = () if functions else (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef))
    inside = {id(node) for function in functions_of for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(imports[node]):
            if other not in imports:
                continue
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            circle = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in sorted(imports):
        if node not in number:
            visit(node)
    return found


def height(imports: Mapping[str, set[str]]) -> int:
    """Return the number of floors on which nodes stand: the longest chain of imports, a circle counted as one."""
    return max(floors_of(imports).values(), default=0)


def floors_of(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the floor of each node: one more than the highest that it imports, the same for all nodes of a circle."""
    whole = {name: min(circle) for circle in circles(imports) for name in circle}
    merged: dict[str, set[str]] = {}
    for name, others in imports.items():
        mine = whole.get(name, name)
        merged.setdefault(mine, set()).update(whole.get(other, other) for other in others if other in imports)
        merged[mine].discard(mine)
    known: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in known:
            known[name] = 1 + max((floor(other) for other in merged[name]), default=0)
        return known[name]

    return {name: floor(whole.get(name, name)) for name in imports}


def picture(root: Path = ROOT) -> str:
    """Return the packages by floor, the highest first, each with the docstring of its `__init__.py` up to a colon."""
    rows = [("floor", "package", "contents")]
    for number in sorted((BACKENDS, *range(1, len(FLOORS))), reverse=True):
        if number == BACKENDS:
            names = sorted(file.parent.name for file in (root / "backends").glob("*/__init__.py"))
            rows.append(("", "backends/", " ".join(name.removeprefix("unipar_") for name in names)))
            continue
        for i, package in enumerate(sorted(FLOORS[int(number)])):
            text = ast.get_docstring(ast.parse((root / "unipar" / package / "__init__.py").read_text("utf-8"))) or ""
            rows.append(("" if i else str(number), package, text.partition(":")[0].rstrip(".")))
    return "\n".join(f"{floor:>5}  {package:12}  {text}" for floor, package, text in rows)


def main(root: Path = ROOT) -> None:
    """Print the measures of the tree at `root`."""
    sys.setrecursionlimit(10_000)
    layout = Layout(root)
    core = {
        name: {o for o in others if o.startswith("unipar.")}
        for name, others in layout.imports.items()
        if name.startswith("unipar.")
    }
    rooms = {room: others for room, others in layout.rooms().items() if room != "errors"}
    folders, lines = layout.folders(), layout.lines()
    largest, longest = max(folders, key=lambda folder: folders[folder]), max(lines, key=lambda name: lines[name])
    listed = [
        entry for entry in (root / "unipar").iterdir() if entry.name != "__pycache__" and entry.suffix in ("", ".py")
    ]
    rows = {
        "modules in unipar/": len([name for name in layout.files if name.startswith("unipar")]),
        "entries of unipar/": f"{sum(e.is_file() for e in listed)} files, {sum(e.is_dir() for e in listed)} folders",
        "floors of these entries (without errors.py)": height(
            {r: {o for o in os if o != "errors"} for r, os in rooms.items()}
        ),
        "imports that point up": len(layout.upward())
        if all((root / "unipar" / p).exists() for p in FLOORS[1])
        else "no floors here",
        "import circles, files": [len(circle) for circle in layout.circles()] or 0,
        "import circles, entries": [len(circle) for circle in circles(layout.rooms())] or 0,
        "longest chain of files": height(core),
        "files in the largest folder": f"{folders[largest]} ({largest})",
        "lines of the longest file": f"{lines[longest]} ({longest})",
    }
    for name, value in rows.items():
        print(f"{name:45}{value}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--picture"]:
        print(picture())
    else:
        main(*(Path(word).resolve() for word in sys.argv[1:]))
