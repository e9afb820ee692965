"""The page "DeepSpeed or FSDP2?": its ds_config.json is carried, its commands run, both libraries train the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.transcript import check_shown, numberless, played
from unipar.config.config_source import load_config_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deepspeed-or-fsdp2.md").read_text("utf-8")
PROOF = "## Do they train the same?"


@pytest.mark.parametrize(
    "until", [PROOF, pytest.param("## What differs", marks=pytest.mark.sweep)], ids=["the import", "whole"]
)
def test_the_page(until: str, tmp_path: Path, forks: Forks) -> None:
    """What is shown is printed, numbers apart; the config is ZeRO-2 with the file's buckets; all strategies agree."""
    shutil.copy(ROOT / "examples/char_gpt.py", tmp_path / "train.py")
    page, _, _ = PAGE.partition(until)
    done: list[str] = []
    for shown, printed in played(page, tmp_path, forks):
        check_shown(numberless(shown.output), numberless(printed))
        verdict = {
            "verify": "all 3 strategies agree with one process over",
            "compare": "all 3 strategies agree with one process",
        }
        command = shown.command.split()[1]
        assert verdict.get(command, "") in printed
        done.append(command)
    assert done == ["import"] if until == PROOF else ["import", "verify", "compare", "plan"]
    config = load_config_file(tmp_path / "train.yaml").config
    assert (config.backend, config.parallel.shard, config.parallel.data) == ("deepspeed", "gradients", 2)
    assert config.options["deepspeed"] == {"reduce": 20_000_000, "gather": 20_000_000}
