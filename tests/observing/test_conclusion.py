"""Conclusion about a command that was observed, from the records of its ranks."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import typer

from tests.support.observations import observed_rank, write_observation
from unipar.cli.commands.observe import observe
from unipar.errors import ConfigError
from unipar.observing import conclusion
from unipar.observing.conclusion import conclude, conclude_again
from unipar.results.observed_rank import observed_rank_path

MISSING = (
    "2 of 4 ranks wrote nothing into this folder (ranks 0, 2): if they ran on a machine that does not share it, "
    "give --out a folder that all share, or copy their rank-* files here and compare all by `unipar observe --from DIR`"
)


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    """They are named with the way out."""
    here = socket.gethostname()
    folder = write_observation(tmp_path / "x", [observed_rank(rank, size=4, host=here) for rank in (1, 3)])
    seen = conclude(["srun", "train"], folder, 0).observation
    assert seen is not None
    assert seen.notes == [MISSING]


def test_ranks_are_compared_once_more(tmp_path: Path) -> None:
    """With the files of all ranks in the folder, none is missing, and the command is that of the first time."""
    here = socket.gethostname()
    folder = write_observation(tmp_path / "x", [observed_rank(0, host=here)])
    first = conclude(["srun", "train"], folder, 3).observation
    assert first is not None
    assert len(first.notes) == 1
    other = observed_rank(1, host=here, losses=(1.0,), batches=(5,))
    observed_rank_path(folder, 1).write_text(other.model_dump_json(), "utf-8")
    again = conclude_again(folder).observation
    assert again is not None
    assert (again.notes, again.command.command, again.command.exit_code) == ([], ("srun", "train"), 3)


def test_the_option_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from DIR` alone prints what is found now; with --strict a fault ends with 1."""
    alone = [observed_rank(rank, size=1) for rank in (0, 1)]
    folder = write_observation(tmp_path / "x", alone)
    observe(earlier=folder)
    assert "fault, no group: the launcher started 2 processes, and 2 of them trained alone" in capsys.readouterr().err
    with pytest.raises(typer.Exit) as ended:
        observe(earlier=folder, strict=True)
    assert ended.value.exit_code == 1


def test_a_folder_without_results(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match=r"holds no observed.json: give the folder of a command that was observed"):
        conclude_again(tmp_path)


def test_ranks_on_other_machines_may_end_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last record is waited for, though not for ever."""
    folder = write_observation(tmp_path / "x", [observed_rank(0, begun=12), observed_rank(1, host="far", steps=8)])
    ended = observed_rank(1, host="far", steps=12, begun=12).model_dump_json()
    later = threading.Timer(0.3, observed_rank_path(folder, 1).write_text, (ended, "utf-8"))
    later.start()
    seen = conclude(["srun", "train"], folder, 0).observation
    later.join()
    assert seen is not None
    assert seen.ranks[1].steps == 12
    monkeypatch.setattr(conclusion, "_PATIENCE", 0.0)
    observed_rank_path(folder, 1).write_text(observed_rank(1, host="far", steps=9).model_dump_json(), "utf-8")
    seen = conclude(["srun", "train"], folder, 0).observation
    assert seen is not None
    assert seen.ranks[1].steps == 9
