"""The route of a config from `launch` to the engine's first step: modules, calls to higher floors, lookups.

    python -m tools.route [--climbs]

A call to a higher floor is counted twice: by floors of packages (tools/floors.py), and by floors of files, where
a file stands one floor above the highest that it imports. A call of a method that a class on the caller's floor or
below declares, as `Task.train` calls the `Run` that it is given, is no such call: the caller knows that class alone;
`--climbs` lists these, too, with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.floors import floor_of
from tools.layout import Layout, floors_of

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "task": {"use": "tools.line:Line"},
    "backend": "native",
    "device": "cpu",
    "batch": {"total": 4},
    "train": {"steps": 1},
    "launch": {"heartbeat": None},
}
HANDED = {"Config", "CheckedSource", "ConfigSource", "SettledConfig", "Prepared", "PreparedRun"}
"""Classes that hold a config."""

LOOKUPS = {
    "strategy of a config": ("strategy_of",),
    "checks": ("check_can_run", "check_strategy"),
    "refusals": ("list_refusals",),
    "batch settled": ("Batch.settle",),
    "GPUs counted": ("count_visible_gpus",),
    "launchers listed": ("list_launchers",),
}
"""Functions that find something out about a config, by what it is; finding a backend is counted apart: it is cached."""


class Recorder:
    """A profile function that counts until the config has arrived."""

    def __init__(self, out: Path, last: tuple[str, str]) -> None:
        """`last`: a base class and the method of it whose call ends the route."""
        self.out, self.last = out, last
        self.modules: set[str] = set()
        self.handed: set[str] = set()
        self.climbs: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not _own(code):
            return
        if event == "return" and code.co_name == "<module>" and code.co_filename.endswith("/registry.py"):
            self._count_find(frame.f_globals)
        if event != "call" or not _is_function(code):
            return
        if self._arrived(frame):
            sys.setprofile(None)
            self._write()
            return
        caller = _caller(frame)
        if caller is not None and not _is_function(caller):
            return  # while a file is imported
        file = _file(code)
        self.modules.add(file)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(type(value).__name__ in HANDED for value in arguments):
            self.handed.add(file)
        for title, names in LOOKUPS.items():
            self.lookups[title] += code.co_qualname in names
        if caller is not None and file != _file(caller):
            names = [f"{_file(one)}:{one.co_qualname}" for one in (caller, code)]
            self.climbs[" -> ".join([*names, _declared(frame)])] += 1

    def _count_find(self, registry: dict[str, Any]) -> None:
        """Count who asks for the run's own backend; `list_launchers` asks every backend for its launchers."""
        find = registry["find_backend"]

        def counting(backend: str) -> Any:
            caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while caller.f_code.co_name.startswith("<") and caller.f_back is not None:
                caller = caller.f_back
            if backend == CONFIG["backend"] and caller.f_code.co_name not in LOOKUPS["launchers listed"]:
                self.lookups["backend"] += 1
            return find(backend)

        registry["find_backend"] = counting

    def _arrived(self, frame: FrameType) -> bool:
        kind, method = self.last
        owner = frame.f_locals.get("self")
        return frame.f_code.co_name == method and any(base.__name__ == kind for base in type(owner).__mro__)

    def _write(self) -> None:
        found = {
            "modules": sorted(self.modules),
            "handed": sorted(self.handed),
            "calls": dict(self.climbs),
            "lookups": dict(self.lookups),
        }
        (self.out / f"{self.last[0]}-{os.getpid()}.json").write_text(json.dumps(found), encoding="utf-8")


def _own(code: CodeType) -> bool:
    return code.co_filename.startswith((f"{ROOT}/unipar/", f"{ROOT}/backends/"))


def _is_function(code: CodeType) -> bool:
    """Return whether it is no module and no body of a class."""
    return bool(code.co_flags & 1)


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{ROOT}/")


def _declared(frame: FrameType) -> str:
    """Return the file of the class that declares the method first, or of the function."""
    code = frame.f_code
    if code.co_varnames[:1] == ("self",):
        for base in reversed(type(frame.f_locals["self"]).__mro__):
            module = sys.modules.get(base.__module__)
            if code.co_name in vars(base) and (file := getattr(module, "__file__", None)):
                return file.removeprefix(f"{ROOT}/")
    return _file(code)


def _caller(frame: FrameType) -> CodeType | None:
    """Return the nearest code of unipar that led here."""
    back = frame.f_back
    while back is not None and not _own(back.f_code):
        back = back.f_back
    return None if back is None else back.f_code


def begin(out: str, kind: str, method: str) -> None:
    """Record this thread from here on."""
    sys.setprofile(Recorder(Path(out), (kind, method)))


WORKER = "from tools.route import begin\nbegin({!r}, 'Engine', 'step')\n"

LAUNCH = """
import unipar
from tools.route import CONFIG, begin
begin({out!r}, {group!r}, "wait")
unipar.launch(CONFIG, overrides={{"parallel.data": {ranks}, "out": {out!r} + "/run"}}, quiet=True)
"""


def measured(ranks: int) -> list[dict[str, Any]]:
    """Return what the launching process and one of its workers recorded."""
    group = "WorkerGroup"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(WORKER.format(folder), encoding="utf-8")
        path = [folder, str(ROOT), str(ROOT / "backends")]
        program = f"import os\nos.environ['PYTHONPATH'] = {os.pathsep.join(path)!r}\n"
        program += LAUNCH.format(out=folder, group=group, ranks=ranks)
        before = {**os.environ, "PYTHONPATH": os.pathsep.join(path[1:])}
        subprocess.run([sys.executable, "-c", program], env=before, cwd=ROOT, check=True)
        files = [next(Path(folder).glob(f"{name}-*.json")) for name in (group, "Engine")]
        return [json.loads(file.read_text("utf-8")) for file in files]


def climbs_of(
    calls: Mapping[str, int], floor: Callable[[str], float | None], *, declared: bool = False
) -> dict[str, int]:
    """Return the calls that go to a file on a higher floor; `declared`: those that a class further down declares."""
    found: dict[str, int] = {}
    for call, number in calls.items():
        caller, called, base = (floor(place.partition(":")[0]) for place in call.split(" -> "))
        if caller is None or called is None or called <= caller:
            continue
        if (base is not None and base <= caller) == declared:
            found[call.rpartition(" -> ")[0]] = number
    return found


def floors_of_files() -> dict[str, float]:
    """Return the floor of each file, named from the repository's root: one above the highest that it imports."""
    layout = Layout(ROOT)
    floors = floors_of(layout.imports)
    return {str(file.relative_to(ROOT)): floors[name] for name, file in layout.files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.route")
    parser.add_argument("--climbs", action="store_true", help="list each call to a higher floor")
    asked = parser.parse_args()
    by_file = floors_of_files()
    for ranks in (1, 2):
        found = measured(ranks)
        climbs = [climbs_of(one["calls"], by_file.get) for one in found]
        climbs_of_packages = [climbs_of(one["calls"], floor_of) for one in found]
        through_classes = [climbs_of(one["calls"], by_file.get, declared=True) for one in found]
        print(f"\nfrom launch to the first step, native/nothing, {ranks} rank{'s' * (ranks > 1)}")
        print(f"{'':34}{'launching':>10}{'worker':>10}{'together':>10}")
        for title, key in (("modules with a call", "modules"), ("of those, handed a config", "handed")):
            both = {file for one in found for file in one[key]}
            _row(title, len(found[0][key]), len(found[1][key]), len(both))
        _row("calls to a higher file", *(sum(one.values()) for one in climbs))
        _row("places of such calls", *(len(one) for one in climbs))
        _row("calls that a lower class declares", *(sum(one.values()) for one in through_classes))
        _row("calls to a higher package", *(sum(one.values()) for one in climbs_of_packages))
        for name in ("backend", *LOOKUPS):
            _row(name, *(one["lookups"].get(name, 0) for one in found))
        if asked.climbs:
            for title, counted in (("to a higher file", climbs), ("declared by a lower class", through_classes)):
                print(f"  {title}:")
                for call, number in sorted((call, n) for one in counted for call, n in one.items()):
                    print(f"    {number} x {call}")


def _row(title: str, launching: int, worker: int, together: int | None = None) -> None:
    print(f"{title:34}{launching:>10}{worker:>10}{launching + worker if together is None else together:>10}")


if __name__ == "__main__":
    main()
