"""The walk of a config through `launch` and `compare`: stays, rooms, climbs and returns, from sys.setprofile.

    python -m tools.route [--steps]

The walk is each call that is given an object which holds a config. A property, a generator that goes on, and what runs
while a file is imported are no calls. A room is a package as `make layout` has them, or a backend; a stay is a row of
calls in one room, a return a stay in a room that was left, a climb a call into a file on a higher floor than its
caller's, where a file stands one floor above the highest that it imports. `--steps` lists the calls.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from tools.layout import Layout, floors_of, module_of, room_of

ROOT = Path(__file__).resolve().parents[1]
HOLDERS = {"Config", "CheckedSource", "ConfigSource", "SettledConfig", "Prepared", "PreparedRun", "CompareRequest"}
"""Classes whose objects hold a config."""

CONFIG = {
    "task": {"use": "tools.line:Line"},
    "backend": "native",
    "device": "cpu",
    "parallel": {"data": 2},
    "batch": {"total": 4},
    "train": {"steps": 8},
    "compare": {"strategies": ["native/nothing"], "repeat": 1},
}
VERBS = {
    "launch": "unipar.launch(CONFIG, overrides=out, quiet=True)",
    "compare": "assert unipar.compare(CONFIG, overrides=out).code == 0",
}
PROGRAM = """
import sys, unipar
from tools.route import CONFIG, Recorder
out, recorder = {{"out": sys.argv[1] + "/run"}}, Recorder()
sys.setprofile(recorder)
{}
sys.setprofile(None)
recorder.write(sys.argv[1] + "/calls.json")
"""


class Call(NamedTuple):
    """A call that is given a config."""

    caller: str
    """File from the repository's root, or "" if it is none of unipar's, and the function in it."""

    called: str


class Recorder:
    """Profile function that records the calls of the main thread which are given a config."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _is_own(frame.f_code) or not _is_new(frame):
            return
        back = frame.f_back
        while back is not None and not _is_own(back.f_code):
            back = back.f_back
        imports = back is not None and not back.f_code.co_flags & inspect.CO_OPTIMIZED
        if not imports and _is_given_config(frame) and not _is_property(frame):
            self._calls.append(Call("" if back is None else _place(back.f_code), _place(frame.f_code)))

    def write(self, file: str) -> None:
        """Write the calls as JSON."""
        Path(file).write_text(json.dumps(self._calls), encoding="utf-8")


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith((f"{ROOT}/unipar/", f"{ROOT}/backends/"))


def _place(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_qualname}"


def _is_new(frame: FrameType) -> bool:
    """Return whether a function begins: no module, no body of a class, and no generator that goes on after a yield."""
    code = frame.f_code
    goes_on = code.co_flags & inspect.CO_GENERATOR and code.co_code[frame.f_lasti + 1]  # argument of RESUME
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not goes_on


def _is_given_config(frame: FrameType) -> bool:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(type(frame.f_locals.get(name)).__name__ in HOLDERS for name in names)


def _is_property(frame: FrameType) -> bool:
    owner = type(frame.f_locals.get("self"))
    return isinstance(inspect.getattr_static(owner, frame.f_code.co_name, None), property | cached_property)


class Walk(NamedTuple):
    """The calls of a walk, and what they come to."""

    calls: list[Call]
    stays: int
    rooms: int
    climbs: list[Call]

    @property
    def returns(self) -> int:
        """Stays in a room that was left before."""
        return self.stays - self.rooms


def walk_of(verb: str) -> Walk:
    """Return the walk of a config through a run of `launch` or `compare`."""
    layout = Layout(ROOT)
    by_module = floors_of(layout.imports)
    floors = {str(file.relative_to(ROOT)): by_module[name] for name, file in layout.files.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
        command = [sys.executable, "-c", PROGRAM.format(VERBS[verb]), folder]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, check=True, capture_output=True)
        calls = [Call(*call) for call in json.loads((Path(folder) / "calls.json").read_text("utf-8"))]
    stays = [room for room, _ in groupby(_room(call.called) for call in calls)]
    climbs = [call for call in calls if call.caller and floors[_file(call.called)] > floors[_file(call.caller)]]
    return Walk(calls, len(stays), len(set(stays)), climbs)


def _file(place: str) -> str:
    return place.partition(":")[0]


def _room(place: str) -> str:
    module = module_of(ROOT / _file(place), ROOT)
    return room_of(module) or module.partition(".")[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.route")
    parser.add_argument("--steps", action="store_true", help="list the calls, by room")
    steps = parser.parse_args().steps
    print(f"{'':12}{'calls':>8}{'stays':>8}{'rooms':>8}{'climbs':>8}{'returns':>9}")
    for verb in VERBS:
        walk = walk_of(verb)
        numbers = (len(walk.calls), walk.stays, walk.rooms, len(walk.climbs))
        print(f"{verb:12}{''.join(f'{number:>8}' for number in numbers)}{walk.returns:>9}")
        for call in walk.climbs:
            print(f"  climb: {call.caller} -> {call.called}")
        for room, calls in groupby(walk.calls if steps else (), lambda call: _room(call.called)):
            print(f"  {room}")
            for call in calls:
                print(f"    {call.called}  from {call.caller}")


if __name__ == "__main__":
    main()
