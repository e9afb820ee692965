"""Lines about checkpoints that a run shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unipar.run_folder.checkpoint_lines import describe_way_on
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog


@pytest.mark.parametrize(("said", "option"), [([], "--resume"), (["train.steps", "out"], "--resume --out 'my runs/x'")])
def test_the_way_on_names_the_folder_that_was_given(
    said: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out the run would not be found again if its folder was given so."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my runs/x"
    run.mkdir(parents=True)
    (run / "launch.json").write_text(json.dumps({"said": said}), "utf-8")
    with RunLog(run_log_path(run, 0)) as run_log:
        run_log.note("checkpoint", step=4, path=str(run / "checkpoints/step-00000004"))
    saved = "my runs/x/checkpoints/step-00000004"
    assert describe_way_on(run, 4) == f"its state is in {saved}: go on with {option}"
    assert describe_way_on(run, 6) == f"its state after step 4 is in {saved}: go on from there with {option}"
