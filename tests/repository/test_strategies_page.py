"""docs/strategies.md, "DeepSpeed or FSDP2": the ds_config.json is carried, the commands run, both train the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.transcript import check_shown, numberless, played
from unipar.config.config_source import load_config_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/strategies.md").read_text("utf-8")
SECTION = PAGE.partition("\n## DeepSpeed or FSDP2\n")[2].partition("\n## ")[0]
PROOF, END = "### Verify both", "### Differences"


@pytest.mark.parametrize("until", [PROOF, pytest.param(END, marks=pytest.mark.sweep)], ids=["the import", "whole"])
def test_deepspeed_or_fsdp2(until: str, tmp_path: Path, forks: Forks) -> None:
    """What is shown is printed, numbers apart; the config is ZeRO-2 with the file's buckets; all strategies agree."""
    shutil.copy(ROOT / "examples/char_gpt.py", tmp_path / "train.py")
    assert until in SECTION
    section, _, _ = SECTION.partition(until)
    done: list[str] = []
    for shown, printed in played(section, tmp_path, forks):
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
