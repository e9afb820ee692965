"""The page from one GPU to many: its configs are ones, its command says what it should, its table is the script's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.batch import IMAGES, WAYS, train_once
from unipar.cli.app import build_app
from unipar.config.config_source import load_config_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/one-gpu-to-many.md").read_text("utf-8")


@pytest.mark.parametrize(("name", "sizes"), [("keep", (32, 4, 1, 8)), ("grow", (256, 32, 1, 8))])
def test_its_configs(tmp_path: Path, name: str, sizes: tuple[int, ...]) -> None:
    """Each is read as a config, with the batch that the page says."""
    (text,) = re.findall(rf"```yaml\n# {name}.yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "x.yaml").write_text(text, "utf-8")
    config = load_config_file(tmp_path / "x.yaml").config
    made = config.batch.settle(8)
    assert (made.total, made.micro, made.accumulate, made.ranks) == sizes
    assert config.train.lr_scale.factor(made.total) == pytest.approx(2.83 if name == "grow" else 1.0, abs=2e-3)


def test_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` shows the rate that comes out, and how."""
    monkeypatch.chdir(ROOT)
    (line,) = re.findall(r"^\$ unipar (explain .*)$", PAGE, re.MULTILINE)
    done = CliRunner().invoke(build_app(), shlex.split(line))
    assert done.exit_code == 0
    (row,) = (row for row in done.stdout.splitlines() if row.startswith("full learning rate"))
    assert row.endswith("derived: train.optimizer.lr x batch.total / base_batch_size = 0.1 x 256 / 64")
    assert row.split()[3] == "0.4"


def test_its_table_is_the_scripts() -> None:
    """A row for each way, with the steps that it takes; losses are a machine's own, and are not run again here."""
    rows = re.findall(r"^\| (\d.*?) \| (\d+) \| [\d.]+ \|", PAGE, re.MULTILINE)
    assert rows == [(way.name, str(4 * -(-IMAGES // way.total))) for way in WAYS]


@pytest.mark.sweep
@pytest.mark.usefixtures("forked")
def test_the_script_trains(tmp_path: Path) -> None:
    """Two epochs of large batches at the old rate: better than a guess among ten."""
    found = train_once(WAYS[1], 2, 0, str(tmp_path / "run"))
    assert found.steps == 12
    assert 0.2 < found.loss < 2.2
