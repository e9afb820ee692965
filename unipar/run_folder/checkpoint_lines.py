"""Lines about checkpoints that a run shows: what was saved, from what it goes on, how a stopped run goes on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unipar.run_folder.layout import read_launch_file, run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.address import is_address
from unipar.utils.files import relative_path
from unipar.utils.text import count_of, format_duration, format_size


def describe_checkpoint_event(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about one event of the run log: resumed, checkpoint, or checkpoint failed."""
    if row["event"] == "resumed":
        for passed in row["passed"]:
            yield f"passed over: {passed}"
        before = f"{row['strategy']}, {count_of(row['size'], 'rank')}"
        read = f"rank 0 read {format_size(row['bytes'])} in {format_duration(row['seconds'])}"
        yield f"goes on after step {row['step']} from {_shown(row)}, saved by {before}; {read}"
        for change in row["told"]:
            yield f"changed since: {change}"
    elif row["event"] == "checkpoint":
        waited = f"training waited {format_duration(row['waited'])}"
        yield f"step {row['step']}  saved {format_size(row['bytes'])} in {_shown(row)}; {waited}"
        for remark in row["remarks"]:
            yield f"checkpoint: {remark}"
    else:
        yield f"step {row['step']}  not saved: {row['said']}"


def _has_section(run: Path) -> bool:
    path = run / "config.json"
    return path.exists() and json.loads(path.read_bytes()).get("checkpoint") is not None


def _out_option(run: Path) -> str:
    """Return the option that --resume needs to find the run, if its folder was given on the command line; else ""."""
    if "out" not in read_launch_file(run).get("said", ()):
        return ""
    return f" --out {shlex.quote(str(relative_path(run)))}"


def _shown(row: Mapping[str, Any]) -> str:
    path = str(row["path"])
    return path if is_address(path) else str(relative_path(Path(path)))


def describe_way_on(run: Path, step: int) -> str:
    """Return how a run that stopped after `step` steps goes on, or what would have kept its state."""
    saved = [row for row in RunLog.read(run_log_path(run, 0)) if row["event"] == "checkpoint"]
    resume = f"--resume{_out_option(run)}"
    if saved and saved[-1]["step"] == step:
        return f"its state is in {_shown(saved[-1])}: go on with {resume}"
    if saved:
        return f"its state after step {saved[-1]['step']} is in {_shown(saved[-1])}: go on from there with {resume}"
    if step and _has_section(run):
        return "its state is lost: no checkpoint was saved before"
    return "its state is lost: a section checkpoint in the config would have kept it" if step else ""
