"""Import of public configs of other libraries: each shape is carried, or refused by a sentence known here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.public_configs import read_shapes, set_aside
from unipar.conversion.import_config import ImportedConfig, import_library_config
from unipar.errors import UniparError

BESIDE: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
"""What a ds_config.json is that an accelerate.yaml names."""

REFUSED: dict[str, str] = {}
"""Files that are not carried, with a part of the sentence that says why."""


def bring(folder: Path, kind: str, data: dict[str, Any]) -> ImportedConfig:
    file = folder / ("ds_config.json" if kind == "ds" else "accelerate.yaml")
    file.write_text(json.dumps(data), encoding="utf-8")
    if isinstance(named := data.get("deepspeed_config", {}).get("deepspeed_config_file"), str):
        (folder / named).parent.mkdir(parents=True, exist_ok=True)
        (folder / named).write_text(json.dumps(BESIDE), encoding="utf-8")
    return import_library_config(file)


def refusals(folder: Path, *, aside: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, (source, kind, data) in enumerate(read_shapes()):
        if set_aside(source) == aside:
            (at := folder / str(number)).mkdir()
            try:
                made = bring(at, kind, data)
                assert "train:" in made.text
            except UniparError as e:
                found[source] = str(e).replace(str(at), "")
    return found


@pytest.mark.parametrize("aside", [False, True])
def test_public_files(aside: bool, tmp_path: Path) -> None:
    """Every file is carried but those that say what unipar has not; of those set aside, nine of ten."""
    found = refusals(tmp_path, aside=aside)
    known = {source: part for source, part in REFUSED.items() if set_aside(source) == aside}
    assert found.keys() == known.keys()
    for source, part in known.items():
        assert part in found[source]
