"""Import of public configs of other libraries: each shape is carried, or refused by a sentence known here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.world import ROOT
from unipar.backend.checks import read_source
from unipar.cli.commands.config.check import check_config
from unipar.config import SHARDS
from unipar.conversion.import_config import ImportedConfig, import_library_config
from unipar.distributed import accelerators
from unipar.errors import UniparError

_FILE = Path(__file__).with_name("public_configs.jsonl")
SEEDS = {1: "20261125", 2: "20261126"}
"""Seed of each lot of files, by which a third of them was set aside before any of them was imported.

Lot 3 was set aside whole: its files were first imported after what the others showed was mended.
"""


def set_aside(source: str, lot: int) -> bool:
    """Return whether a file belongs to the part of its lot that was opened once, at the end."""
    if lot not in SEEDS:
        return True
    digest = hashlib.sha256(f"{SEEDS[lot]} {source}".encode()).hexdigest()
    return int(digest, 16) % 3 == 0


def read_shapes(lot: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the source, the kind (`ds`, `accelerate` or `args`) and the mapping of each file of a lot."""
    rows = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    return [(row["from"], row["kind"], _nest(row["keys"])) for row in rows if row.get("lot", 1) == lot]


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        into = tree
        for name in above:
            into = into.setdefault(name, {})
        into[last] = value
    return tree


BESIDE: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
"""What a ds_config.json is that an accelerate.yaml names."""

TASK = f"task: {{use: {ROOT}/examples/char_gpt.py:CharGPT}}"

HERE = ("machines.nodes=1",)
"""Settings under which `unipar check` judges a run over several machines on this one."""

REFUSED: dict[str, str] = {
    "deepspeedai/DeepSpeedExamples:compression/gpt2/config/ds_config_W8A8_Qgroup64_fp32.json": (
        "compression_training: unipar does not change the model; leave it out with --leave compression_training"
    ),
    "NovaSky-AI/SkyThought:skythought/train/LLaMA-Factory/examples/extras/galore/llama3_full_sft.yaml": (
        "use_galore (line 1): true has no key of unipar; leave it out with --leave use_galore"
    ),
}
"""Files that are not carried, with a part of the sentence that says why."""


def bring(folder: Path, kind: str, data: dict[str, Any]) -> ImportedConfig:
    file = folder / {"ds": "ds_config.json", "accelerate": "accelerate.yaml", "args": "recipe.yaml"}[kind]
    file.write_text(json.dumps(data), encoding="utf-8")
    beside = data.get("deepspeed")
    named = data.get("deepspeed_config", {}).get("deepspeed_config_file")
    if named is None and isinstance(beside, str) and beside.endswith(".json"):
        named = beside
    if isinstance(named, str):
        (folder / named).parent.mkdir(parents=True, exist_ok=True)
        (folder / named).write_text(json.dumps(BESIDE), encoding="utf-8")
    return import_library_config(file)


def untold(made: ImportedConfig, data: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield each key of the file that was neither read nor left out with a remark."""
    told = made.read | {note.partition(": ")[0] for note in made.left_out}
    for key, value in data.items():
        name = f"{above}{key}"
        if name in told - made.read:
            continue
        if isinstance(value, dict) and value:
            yield from untold(made, value, f"{name}.")
        elif name not in told:
            yield f"{name} is dropped silently"


def check_values(made: ImportedConfig, data: dict[str, Any]) -> None:
    """Rate, decay, ZeRO's stage and clip are the file's numbers, or the Trainer's where it says "auto"."""
    train, params = made.config.train, data.get("optimizer", {}).get("params", {})
    top = data.get("scheduler", {}).get("params", {}).get("warmup_max_lr")
    rate = params.get("lr") if top in (None, "auto") else top
    if rate == "auto" or isinstance(rate, float):
        assert train.optimizer.lr == (5e-5 if rate == "auto" else rate)
    if isinstance(decay := params.get("weight_decay"), int | float):
        assert train.optimizer.weight_decay == decay
    if isinstance(clip := data.get("gradient_clipping"), int | float):
        assert train.clip == (clip or None)
    if "stage" in data.get("zero_optimization", {}):
        assert made.config.parallel.shard == SHARDS[data["zero_optimization"]["stage"]]


def check_one(folder: Path, kind: str, data: dict[str, Any]) -> str | None:
    """Return why a file is not carried whole on this machine, or None."""
    folder.mkdir(parents=True)
    try:
        made = bring(folder, kind, data)
        check_values(made, data if kind == "ds" else {})
        if silent := list(untold(made, data)):
            return "; ".join(silent)
        (folder / "train.yaml").write_text(f"{TASK}\n{made.text}", encoding="utf-8")
        assert "good" in check_config(read_source(folder / "train.yaml", HERE if made.config.machines else ()))
    except UniparError as e:
        return str(e).replace(str(folder), "")
    return None


def refusals(folder: Path, lot: int, *, aside: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return why files are not carried, by source: neither on a machine with 64 GPUs nor on one with 8."""
    found: dict[str, str] = {}
    for number, (source, kind, data) in enumerate(read_shapes(lot)):
        if set_aside(source, lot) == aside:
            for gpus_here in (64, 8):
                monkeypatch.setattr(accelerators, "count_visible_gpus", lambda gpus_here=gpus_here: gpus_here)
                if (why := check_one(folder / str(number) / str(gpus_here), kind, data)) is None:
                    found.pop(source, None)
                    break
                found.setdefault(source, why)
    return found


LOTS = [
    (1, False),
    (1, True),
    pytest.param(2, False, marks=pytest.mark.sweep),
    (2, True),
    pytest.param(3, True, marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("lot", "aside"), LOTS)
def test_public_files(lot: int, *, aside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is carried, or told, and `unipar check` accepts the result; what unipar has not is refused."""
    found = refusals(tmp_path, lot, aside=aside, monkeypatch=monkeypatch)
    here = {source for source, _, _ in read_shapes(lot) if set_aside(source, lot) == aside}
    known = {source: part for source, part in REFUSED.items() if source in here}
    assert found.keys() == known.keys()
    for source, part in known.items():
        assert part in found[source]
