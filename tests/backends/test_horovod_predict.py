"""Bytes that Horovod sends, beside its own optimizer and library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.world import ROOT
from unipar.launcher.processes.group import WorkerGroup

pytestmark = pytest.mark.forked


def test_as_horovod_does(tmp_path: Path) -> None:
    """Its library reduces on one rank what is planned for any number: further ones would need processes.

    So its optimizer is told of a second one. How tensors are fused, which changes no bytes, is not compared.
    """
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (5, 2, {}),  # an unused parameter, and frozen ones
        (182, 1, {"compression": "fp16", "fusion_mb": 0}),
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases), "utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with WorkerGroup(tmp_path, 1, "tests.support.horovod_library:run", environment={"PYTHONPATH": path}) as workers:
        workers.wait()
    for planned, sent in json.loads((tmp_path / "compared.json").read_text("utf-8")):
        assert sent["all_reduce"] > 10_000
        assert planned == dict.fromkeys(("2", "3", "8", "64", "1000"), sent)
