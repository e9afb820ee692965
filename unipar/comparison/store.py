"""Result files of a comparison (compare.json, compare.csv): writing them, and deciding whether they can be reused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unipar.backend.installed import installed_versions, machine_summary
from unipar.config import Config, Strategy
from unipar.errors import ConfigError, OutExists, ReportError
from unipar.results.comparison import Comparison
from unipar.results.result_files import original_config_path, parse_comparison, read_mapping
from unipar.results.scaling import Scaling
from unipar.results.spreadsheet import format_comparison_csv, format_scaling_csv
from unipar.task.reference import TaskRef
from unipar.utils.files import write_file_atomically
from unipar.utils.mappings import nested_mapping

COMPARE_JSON = "compare.json"
COMPARE_CSV = "compare.csv"


_REQUEST_KEYS = ("config", "strategies", "task", "weights", "threads")
_MACHINE_KEYS = ("versions", "machine", "memory")

_OLDER_WORDS = {
    r"memory was not watched: of the host, ": "the host's memory was not recorded: ",
    r"memory was not watched": "memory was not recorded",
    r"memory was watched in": "memory was recorded in",
    r", so that what a step sends was not seen": ", communication in none",
    r"leaves no more; (\d+) would": r"leaves no more; \1 steps are enough",
    r"step for it beside those that are timed": "step for it besides the timed ones",
    r"of memory torch's own tensors alone were watched": "memory was recorded of torch's own tensors only",
}
"""Words on memory that older files have in `of`, as patterns, with the words that are written now."""


def comparison_identity(
    config: Config, strategies: Sequence[str], ref: TaskRef, threads: str, unwatched: str
) -> dict[str, Any]:
    """Return everything that must be equal to reuse an earlier result; `unwatched`: what memory is not recorded."""
    text = config.model_dump_json(exclude={"out"})
    return {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "strategies": list(strategies),
        "task": _hash_task(ref),
        "weights": _stamp_weights(config),
        "threads": threads,
        "versions": installed_versions(Strategy.parse(strategy).backend for strategy in strategies),
        "machine": machine_summary(),
        "memory": unwatched,
    }


def _hash_task(ref: TaskRef) -> str:
    """Return a hash of the task's files and arguments; modules that they import are not included."""
    record = ref.to_json() | {"path": None}
    del record["argv"]  # what the script makes of its arguments is in the values that the task reads
    if not record["values"]:
        del record["values"]  # as in a version that had none
    reference = json.dumps(record, sort_keys=True, default=str).encode()
    places = [ref.task, *ref.functions.values()]
    files = sorted({place.file for place in places if place is not None and place.file is not None})
    return hashlib.sha256(reference + b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _stamp_weights(config: Config) -> list[int] | None:
    """Return size and time of the weights' file, which may be too large to hash; None if there is none."""
    wanted = config.model.loading
    if wanted is None:
        return None
    stat = Path(wanted.file).stat()
    return [stat.st_size, stat.st_mtime_ns]


def reuse_or_clear(folder: Path, of: dict[str, Any], *, overwrite: bool) -> Comparison | None:
    """Return an earlier run of the same comparison, and remove the folders of strategies that did not run to their end.

    Return None and remove its files if no strategy can be reused; raise OutExists if the folder holds something else.
    """
    file = folder / COMPARE_JSON
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise OutExists(f"{folder} exists and holds no {COMPARE_JSON}: move it away, or give another out")
        return None
    try:
        data = read_mapping(file, "comparison")
        old = nested_mapping(data, "of")
        strategies = [Strategy.parse(strategy).slug for strategy in old["strategies"]]
        stored = parse_comparison(file, data)
    except (ReportError, ConfigError, LookupError, TypeError):
        if not overwrite:
            raise OutExists(
                f"{file} is truncated or was not written by unipar: give --overwrite to replace it, or another out"
            ) from None
        _remove_result_files(folder)
        return None
    finished = [] if overwrite else [row.strategy for row in stored.rows if row.outcome == "ran"]
    if not overwrite:
        differ = [key for key in _REQUEST_KEYS if old.get(key) != of.get(key)]
        differ += [key for key in _MACHINE_KEYS if finished and not _still_holds(old.get(key), of[key])]
        if differ:
            raise OutExists(
                f"{folder} holds another comparison (other {', '.join(differ)}): "
                "give --overwrite to replace it, or another out"
            )
    for slug in {*strategies} - {Strategy.parse(strategy).slug for strategy in finished}:
        shutil.rmtree(folder / slug, ignore_errors=True)
    if finished:
        return stored
    _remove_result_files(folder)
    return None


def _still_holds(before: Any, now: Any) -> bool:
    """Return whether an earlier value is equal; a library that was installed since makes no difference."""
    if isinstance(before, str):
        for pattern, words in _OLDER_WORDS.items():
            before = re.sub(pattern, words, before)
    return before == now or (isinstance(before, dict) and before.items() <= now.items())


def _remove_result_files(folder: Path) -> None:
    """Remove the result files; compare.json last, because it marks the folder as a comparison's."""
    (folder / COMPARE_CSV).unlink(missing_ok=True)
    (folder / COMPARE_JSON).unlink()


def write_comparison(folder: Path, of: dict[str, Any], now: Comparison) -> None:
    """Write all figures as JSON, and one row for each strategy as CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"of": of, "finished": now.finished, **now.model_dump(mode="json")}
    write_file_atomically(folder / COMPARE_JSON, json.dumps(data, indent=2) + "\n")
    write_file_atomically(folder / COMPARE_CSV, format_comparison_csv(now))


def write_scaling(folder: Path, figures: str, rows: str, now: Scaling) -> None:
    """Write all figures as JSON, and one row for each world as CSV."""
    write_file_atomically(folder / figures, json.dumps(now.model_dump(mode="json"), indent=2) + "\n")
    write_file_atomically(folder / rows, format_scaling_csv(now))


def write_original_config(folder: Path, name: str, config: Config) -> None:
    """Write the config as given, under its own name, so that it can be run again."""
    file = original_config_path(folder, name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(config.json_for_ranks(), encoding="utf-8")


def write_or_explain(folder: Path, write: Callable[[], None]) -> str:
    """Call `write`; return why the results could not be written, or ""."""
    try:
        write()
    except OSError as e:
        return f"the results could not be written: {e.filename or folder} ({e.strerror or e})"
    return ""
