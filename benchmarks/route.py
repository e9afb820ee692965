"""Route of a config from `launch` to the engine's first step: modules, calls to higher floors, lookups.

    python -m benchmarks.route [--climbs] [--moves FILE]

`--climbs` lists each call into a file on a higher floor. `--moves`: a JSON file with `move` (file to file) and
`split` (file to file to top-level names), which says where the files of another layout will be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.floors import floor_of

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "task": {"use": "benchmarks.line:Line"},
    "backend": "native",
    "device": "cpu",
    "batch": {"total": 4},
    "train": {"steps": 1},
    "launch": {"heartbeat": None},
}
HANDED = {"Config", "CheckedSource", "ConfigSource", "SettledConfig", "PreparedRun"}
"""Names of classes that hold a config."""

LOOKUPS = (
    *("cell_of", "cell_in", "check_can_run", "check_cell", "list_refusals"),
    *("Batch.settle", "count_visible_gpus", "list_launchers"),
)
"""Functions that look something up for a config, by qualified name; the cached `find_backend` is counted apart."""


class Recorder:
    """Profile function that counts until the config has arrived."""

    def __init__(self, out: Path, last: tuple[str, str]) -> None:
        """Write results into `out`; `last` is a base class and the method whose call ends the route."""
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
            return  # the call happens while a file is imported
        file = _file(code)
        self.modules.add(file)
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(type(value).__name__ in HANDED for value in arguments):
            self.handed.add(file)
        if code.co_qualname in LOOKUPS:
            self.lookups[code.co_qualname] += 1
        if caller is not None and file != _file(caller):
            names = [f"{_file(one)}:{one.co_qualname}" for one in (caller, code)]
            self.climbs[" -> ".join(names)] += 1

    def _count_find(self, registry: dict[str, Any]) -> None:
        """Count the calls of `find_backend` for the run's own backend, without those of `list_launchers`."""
        find = registry["find_backend"]

        def counting(name: str) -> Any:
            caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while caller.f_code.co_name.startswith("<") and caller.f_back is not None:
                caller = caller.f_back
            if name == CONFIG["backend"] and caller.f_code.co_name != "list_launchers":
                self.lookups["find_backend"] += 1
            return find(name)

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
    """Return whether the code is a function's, not a module's or a class body's."""
    return bool(code.co_flags & 1)


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{ROOT}/")


def _caller(frame: FrameType) -> CodeType | None:
    """Return the code of unipar that made this call, directly or through other libraries."""
    back = frame.f_back
    while back is not None and not _own(back.f_code):
        back = back.f_back
    return None if back is None else back.f_code


def begin(out: str, kind: str, method: str) -> None:
    """Record the calls of this thread from now on."""
    sys.setprofile(Recorder(Path(out), (kind, method)))


WORKER = "from benchmarks.route import begin\nbegin({!r}, 'Engine', 'step')\n"

LAUNCH = """
import unipar
from benchmarks.route import CONFIG, begin
begin({out!r}, "WorkerGroup", "wait")
unipar.launch(CONFIG, overrides={{"parallel.data": {ranks}, "out": {out!r} + "/run"}}, quiet=True)
"""


def measured(ranks: int) -> list[dict[str, Any]]:
    """Return the records of the launching process and of one of its workers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(WORKER.format(folder), encoding="utf-8")
        path = [folder, str(ROOT), str(ROOT / "backends")]
        program = f"import os\nos.environ['PYTHONPATH'] = {os.pathsep.join(path)!r}\n"
        program += LAUNCH.format(out=folder, ranks=ranks)
        before = {**os.environ, "PYTHONPATH": os.pathsep.join(path[1:])}
        subprocess.run([sys.executable, "-c", program], env=before, cwd=ROOT, check=True)
        files = [next(Path(folder).glob(f"{name}-*.json")) for name in ("WorkerGroup", "Engine")]
        return [json.loads(file.read_text("utf-8")) for file in files]


def climbs_of(calls: Mapping[str, int], moves: Mapping[str, Any]) -> dict[str, int]:
    """Return the calls into files on a higher floor, with their numbers."""

    def floor(place: str) -> float | None:
        file, name = place.split(":", 1)
        parts = {top: new for new, names in moves.get("split", {}).get(file, {}).items() for top in names}
        return floor_of(parts.get(name.split(".")[0], moves.get("move", {}).get(file, file)))

    found: dict[str, int] = {}
    for call, number in calls.items():
        above, below = (floor(place) for place in call.split(" -> "))
        if above is not None and below is not None and below > above:
            found[call] = number
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.route")
    parser.add_argument("--climbs", action="store_true", help="list each call to a higher floor")
    parser.add_argument("--moves", type=Path, help="where files of another layout will be, as JSON")
    asked = parser.parse_args()
    moves = json.loads(asked.moves.read_text("utf-8")) if asked.moves else {}
    for ranks in (1, 2):
        found = measured(ranks)
        climbs = [climbs_of(one["calls"], moves) for one in found]
        print(f"\nfrom launch to the first step, native/nothing, {ranks} rank{'s' * (ranks > 1)}")
        print(f"{'':34}{'launching':>10}{'worker':>10}{'together':>10}")
        for title, key in (("modules with a call", "modules"), ("of those, handed a config", "handed")):
            both = {file for one in found for file in one[key]}
            _row(title, len(found[0][key]), len(found[1][key]), len(both))
        _row("calls to a higher floor", *(sum(one.values()) for one in climbs))
        _row("places of such calls", *(len(one) for one in climbs))
        for name in ("find_backend", *LOOKUPS):
            _row(name, *(one["lookups"].get(name, 0) for one in found))
        if asked.climbs:
            for call, number in sorted((call, n) for one in climbs for call, n in one.items()):
                print(f"  {number} x {call}")


def _row(title: str, launching: int, worker: int, together: int | None = None) -> None:
    print(f"{title:34}{launching:>10}{worker:>10}{launching + worker if together is None else together:>10}")


if __name__ == "__main__":
    main()
