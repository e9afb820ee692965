"""Process that reads a checkpoint of another library, and leaves its tensors in a folder of unipar's own format.

What is pickled is read here only, and only inert objects come of it; the parent reads safetensors and JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unipar.backend import registry
from unipar.checkpoint.importing.dcp_folder import collect_dcp, dcp_folders
from unipar.checkpoint.importing.found_state import ModelState, StateCollector
from unipar.checkpoint.importing.state_dicts import (
    PICKLED,
    WEIGHT_FILES,
    collect_files,
    holds_weight_files,
    needs_pickle,
)
from unipar.checkpoint.protocol.save_checkpoint import save_checkpoint
from unipar.checkpoint.protocol.verifying import CheckpointContents, verify_checkpoint
from unipar.errors import CheckpointError

TRANSIT_STEP = 1
"""Step under which tensors are left in the folder between both processes."""


def kind_of_source(path: Path) -> str:
    """Return how a path is read: the name of a backend, "dcp" or "files"; raise CheckpointError if it is not known."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name the library's checkpoint folder or file")
    for name in registry.backend_names():
        if registry.find_backend(name).recognizes_checkpoint(path):
            return name
    if path.is_dir() and dcp_folders(path):
        return "dcp"
    if (path.is_file() and path.suffix in (*PICKLED, ".safetensors")) or holds_weight_files(path):
        return "files"
    files, ends = ", ".join(WEIGHT_FILES), ", ".join((".safetensors", *PICKLED))
    raise CheckpointError(
        f"{path}: no checkpoint of another library that is known: a folder with {files}, .metadata or "
        f"*_model_states.pt, or a file ending in {ends}"
    )


def is_pickled(path: Path, kind: str, *, weights_only: bool) -> bool:
    """Return whether a source of this kind can be read by unpickling only."""
    return kind != "files" or needs_pickle(path, weights_only=weights_only)


def leave_tensors(request: dict[str, Any]) -> None:
    """Read what a request names, and leave its tensors in the request's folder."""
    path, kind, weights_only = Path(request["source"]), request["kind"], bool(request["weights_only"])
    into = StateCollector(str(path), ModelState(**request["model"]), [(old, new) for old, new in request["rename"]])
    if kind == "files":
        collect_files(path, into, weights_only=weights_only)
    elif kind == "dcp":
        collect_dcp(path, into, weights_only=weights_only)
    else:
        registry.find_backend(kind).collect_checkpoint(path, into, weights_only=weights_only)
    collected = into.finish()
    state = {"found_step": collected.step, "skipped": collected.skipped, "remarks": collected.remarks}
    save_checkpoint(Path(request["folder"]), TRANSIT_STEP, collected.pieces, state)


def take_tensors(
    source: Path,
    kind: str,
    model: ModelState,
    folder: Path,
    *,
    rename: Sequence[tuple[str, str]],
    weights_only: bool,
) -> CheckpointContents:
    """Have a source read, in a process of its own if it is pickled; return its tensors, verified."""
    request = {
        "source": str(source.absolute()),
        "kind": kind,
        "model": asdict(model),
        "folder": str(folder),
        "rename": list(rename),
        "weights_only": weights_only,
    }
    if is_pickled(source, kind, weights_only=weights_only):
        file = folder / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        words = [sys.executable, "-m", __name__, str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            error_lines = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise CheckpointError(error_lines[0].removeprefix("unipar: "))
    else:
        leave_tensors(request)
    return verify_checkpoint(folder / f"step-{TRANSIT_STEP:08d}")


def answer_request() -> None:
    """Do what the request in the file that is named first asks for; an error is the last line of stderr."""
    try:
        leave_tensors(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    except CheckpointError as e:
        sys.stderr.write(f"unipar: {e}\n")
        sys.exit(1)


if __name__ == "__main__":
    answer_request()
