"""Signals, a rank that stops, a network that is cut, losses that are no numbers, configs that are nonsense."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.disturbed_runs import FAULTS
from tests.support.training_kills import STRATEGIES
from unipar.config.config_source import load_config_file
from unipar.errors import ConfigError, UniparError
from unipar.utils.table import format_table

ROOT = Path(__file__).parents[2]
TRIALS = 10_000

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf"), 0.5, "", " ", "auto"),
    *("null", "true", "1", "1e999", "0x10", "3h50m", "-3m", "../../etc/passwd", "/dev/null", "s3://", "s3://a:b@c"),
    *("trap_that_must_not_be_imported:X", "a" * 100_000, "\0", "\ud800", "{}", "[]", "!!python/object:os.system x"),
    *([], {}, [None], [[[]]], {"": ""}, {"a": {"b": {"c": {}}}}, [1, "a", {}]),
    {"use": "trap_that_must_not_be_imported:X"},
    *(b"bytes".decode(), "${HOME}", "*", "native/*", "deepspeed/parameters+tensor0", "native/nothing+tensor2+tensor2"),
)  # fmt: skip
_CHARACTERS = "\0\t\n :-[]{}#&*!|>'\"%@`,?aZ0\x85\u2028é"
_IMPORTED = "trap_that_must_not_be_imported"


def load_nonsense(trials: int, seed: int) -> Counter[str]:
    """Read so many configs; return how often each outcome was seen."""
    outcomes = Counter[str]()
    ran: list[str] = []

    def hook(event: str, arguments: Any) -> None:
        imports = event == "import" and arguments[0] == _IMPORTED
        if watching and (imports or event in ("os.system", "subprocess.Popen")):
            ran.append(event)

    watching = True
    sys.addaudithook(hook)
    try:
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "nonsense.yaml"
            for text in nonsense(trials, seed):
                file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
                outcomes[_outcome(file) if not ran else f"ran {ran[0]}"] += 1
    finally:
        watching = False
    return outcomes


def _outcome(file: Path) -> str:
    try:
        load_config_file(file, (), None)
    except ConfigError as e:
        said = str(e)
        if re.search(r"line \d+|column \d+", said):
            return "refused with a line"
        return (
            "refused with a key"
            if re.search(r"[a-z_]+(\.[a-z_]+)*: |key", said)
            else f"refused without a place: {said}"
        )
    except UniparError as e:
        return f"another error: {type(e).__name__}: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "read"


def nonsense(trials: int, seed: int) -> Iterator[str]:
    """Yield so many texts of configs."""
    draw = random.Random(seed)
    shipped = [file.read_text("utf-8") for file in sorted((ROOT / "configs").glob("*.yaml"))]
    for _ in range(trials):
        text = draw.choice(shipped)
        if draw.random() < 0.4:
            yield _with_other_characters(text, draw)
            continue
        config = yaml.safe_load(text)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            _change(config, draw)
        try:
            yield json.dumps(config) if draw.random() < 0.5 else yaml.safe_dump(config, allow_unicode=True)
        except (yaml.YAMLError, RecursionError):
            yield json.dumps(config)


def _with_other_characters(text: str, draw: random.Random) -> str:
    for _ in range(draw.choice((1, 1, 2, 10, 50))):
        at = draw.randrange(len(text) + 1)
        match draw.choice(("put", "take", "double")):
            case "put":
                text = text[:at] + draw.choice(_CHARACTERS) + text[at:]
            case "take":
                text = text[:at] + text[at + draw.choice((1, 5, 40)) :]
            case _:
                text = text[:at] + text[max(0, at - 30) : at] + text[at:]
    return text


def _change(config: Any, draw: random.Random) -> None:
    """Change one value, key or place in a config, at a random depth."""
    place: Any = config
    while isinstance(place, dict) and place:
        key = draw.choice(list(place))
        if not isinstance(place[key], dict) or not place[key] or draw.random() < 0.4:
            break
        place = place[key]
    if not isinstance(place, dict):
        return
    if not place:
        place["more"] = draw.choice(_VALUES)
        return
    key = draw.choice(list(place))
    match draw.choice(("value", "value", "value", "name", "more", "take", "nest")):
        case "value":
            place[key] = draw.choice(_VALUES)
        case "name":
            place[str(key)[:-1] + draw.choice("xs_-. ")] = place.pop(key)
        case "more":
            place[draw.choice(("", "steps", "Total", "__class__", "task.use", "a" * 1000, "0"))] = draw.choice(_VALUES)
        case "take":
            del place[key]
        case _:
            place[key] = {key: place[key]}


pytestmark = pytest.mark.chaos

TRIALS_OF_A_STRATEGY = {"SIGTERM or SIGUSR1": 5, "a second SIGTERM": 3}
"""Runs of each strategy, where it is more than one."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_promised_outcome(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In each strategy: exit code, words, time, and what is published are as docs/checkpoints.md promises."""
    rows: list[tuple[str, ...]] = []
    wrong: list[Any] = []
    for strategy in STRATEGIES:
        trials = TRIALS_OF_A_STRATEGY.get(fault, 1)
        played = [_disturbed(tmp_path / f"{len(rows)}-{seed}", strategy, fault, seed) for seed in range(trials)]
        codes = sorted({str(one["code"]) for one in played})
        rows.append((strategy, str(trials), ", ".join(codes), f"{max(one['seconds'] for one in played):.1f}"))
        wrong += [one for one in played if one["faults"]]
    with capsys.disabled():
        header = (f"{fault}, seeds from 0", "trials", "exit codes", "longest, s")
        print("\n" + format_table(header, rows, right=(1, 2, 3)))
        print(f"faults: {len(wrong)}")
    assert wrong == []


def _disturbed(folder: Path, strategy: str, fault: str, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.disturbed_runs", str(folder), strategy, fault, str(seed)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Of one config, in one folder: each has a folder of its own, and both train to the end."""
    config = {
        "task": {"use": f"{Path(__file__).parents[1]}/support/tiny.py:Tiny"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 20},
        "checkpoint": {"every": 5},
    }
    (tmp_path / "twice.json").write_text(json.dumps(config), "utf-8")
    command = [sys.executable, "-m", "unipar", "run", "twice.json"]
    both = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    said = [one.communicate()[1].decode() for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["twice", "twice-2"]


def test_ten_thousand_configs_of_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is read, or refused by an error of unipar's that names a key or a line; none imports or runs anything."""
    outcomes = load_nonsense(TRIALS, seed=15)
    with capsys.disabled():
        print("\n" + format_table(("config, seed 15", "trials"), [(k, str(v)) for k, v in sorted(outcomes.items())]))
    assert sum(outcomes.values()) == TRIALS
    assert set(outcomes) <= {"read", "refused with a key", "refused with a line"}
    assert outcomes["read"] > TRIALS / 20
    assert outcomes["refused with a line"] > TRIALS / 20
