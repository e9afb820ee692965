"""Trackers: what the real libraries have of a run, offline; and that none of them can end one."""

from __future__ import annotations

import os
import signal
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.support.running import Line, running
from tests.support.world import SOON
from unipar.backend.checks import check_names
from unipar.config.config_source import load_given_config
from unipar.errors import BackendNotInstalled, ConfigError, Stopped
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task import Run
from unipar.tracking import tracker, writer
from unipar.tracking.tracker import Tracker
from unipar.tracking.writer import TrackerWriter

TOY = Path(__file__).parents[1] / "support" / "toy"


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without variables of theirs; whatever a tracker sets is gone afterwards."""
    told = [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]
    for name in {*told, "WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY"}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_bare")
@pytest.mark.filterwarnings("ignore")  # libraries' own
def test_what_each_library_has_of_a_run(tmp_path: Path) -> None:
    """Steps, evaluations, named values and the config, read back from TensorBoard's, W&B's and MLflow's files."""
    to = ["tensorboard", "wandb", "mlflow"]
    with running(Line(), tmp_path, log={"every": 1, "to": to}, eval={"every": 3}) as run:
        run.task.train(run)
        run.log(lamps=2)
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row for row in rows if row["event"] == "tracker"] == []
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    assert len(losses) == 3
    held = rows[-3]["loss"]
    assert rows[-3]["event"] == "eval"
    for found in (_tensorboard(tmp_path), _wandb(tmp_path), _mlflow(tmp_path)):
        assert [step for step, _ in found["loss"]] == [1, 2, 3]
        assert [value for _, value in found["loss"]] == pytest.approx(losses, rel=1e-6)
        assert found["eval/loss"] == [(3, pytest.approx(held, rel=1e-6))]
        assert found["log/lamps"] == [(3, 2.0)]
        assert {"norm", "lr", "samples", "seconds"} <= found.keys()
    with sqlite3.connect(tmp_path / "mlflow.db") as opened:
        params = dict(opened.execute("select key, value from params").fetchall())
        ((experiment,),) = opened.execute("select name from experiments where name != 'Default'").fetchall()
    opened.close()
    assert (params["batch.total"], params["train.optimizer.name"], experiment) == ("4", "sgd", "unipar")


def _tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    config, *_ = events.Tensors("config/text_summary")
    assert b"batch.total: 4\n" in config.tensor_proto.string_val[0]
    tags: Any = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def _mlflow(run: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    opened = sqlite3.connect(run / "mlflow.db")
    for key, step, value in opened.execute("select key, step, value from metrics order by step"):
        found.setdefault(key, []).append((step, value))
    assert opened.execute("select status from runs").fetchall() == [("FINISHED",)]
    opened.close()
    return found


def _wandb(run: Path) -> dict[str, list[tuple[int, float]]]:
    """W&B's offline file is a log of records, in blocks of 32 KiB after a header of 7 bytes."""
    import json

    from wandb.proto import wandb_internal_pb2

    made: Any = wandb_internal_pb2

    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({file.name for file in files}) == 1  # the name has the run's id
    found: dict[str, list[tuple[int, float]]] = {}
    seen: set[str] = set()
    for data in (record for file in files for record in _records(file.read_bytes())):
        record: Any = made.Record()
        record.ParseFromString(data)
        seen.add(record.WhichOneof("record_type"))
        if record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert record.run.project == "unipar"
            sizes = {"total": 4, "micro": 2, "accumulate": None, "memory": None, "headroom": 0.05}
            sizes |= {"tokens": None, "max_length": None, "rows": "padded", "memory_check": False}
            assert config["batch"] == sizes
        if record.HasField("history"):
            row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            for key, value in row.items():
                if not key.startswith("_"):
                    found.setdefault(key, []).append((row["_step"], value))
    assert {"run", "history", "exit"} <= seen
    return found


def _records(data: bytes) -> Iterator[bytes]:
    at, held = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield held
            held = b""


@pytest.mark.usefixtures("_bare")
@pytest.mark.filterwarnings("ignore")  # libraries' own
def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    """Killed after step 5, it goes on from step 3: one run in each library, with the config of both attempts."""
    keeps = {"every": 3, "async": False}
    sections: dict[str, Any] = {"log": {"every": 1, "to": ["tensorboard", "wandb", "mlflow"]}, "checkpoint": keeps}

    class Killed(Line):
        @override
        def train(self, run: Run) -> None:
            for local_batch in run.batches():
                run.step(local_batch)
                if run.done == 5:
                    run._log.close()  # pyright: ignore[reportAttributeAccessIssue] - trackers have written these steps
                    raise RuntimeError("gone")

    optimizer = {"name": "sgd", "lr": 1e-3}
    train = {"steps": 7, "optimizer": optimizer}
    with pytest.raises(RuntimeError), running(Killed(), tmp_path, train=train, **sections) as run:
        run.task.train(run)
    with running(Line(), tmp_path, train=train, resume="auto", eval={"every": 7}, **sections) as run:
        run.task.train(run)
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row for row in rows if row["event"] == "tracker"] == []
    losses = [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7]
    for found in (_tensorboard(tmp_path), _wandb(tmp_path), _mlflow(tmp_path)):
        assert found["loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]
        assert len(found["eval/loss"]) == 1
    with sqlite3.connect(tmp_path / "mlflow.db") as opened:
        assert opened.execute("select key, value from tags where key like 'now.%'").fetchall() == [
            ("now.eval.every", "7"),
            ("now.resume", "auto"),
        ]
    opened.close()


def test_a_tracker_that_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker without go_on() gets every step of this attempt, and a line says what that means."""
    _offer(monkeypatch, {"x": _Kept})
    (said,) = _notes_of(tmp_path, 3)
    assert said == "x may show steps after 3 twice: it has no go_on()"
    assert _notes_of(tmp_path, None) == []


def _notes_of(run: Path, after: int | None) -> list[str]:
    said: list[str] = []

    def note(event: str, **fields: Any) -> None:
        said.append(fields["said"])

    TrackerWriter(("x",), run, 0, note=note, after=after).close()
    return said


class _Kept(Tracker):
    """What trackers of tests were given."""

    pages: list[tuple[int, list[str]]]

    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        type(self).pages = []

    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        self.pages.append((step, sorted(named)))

    @override
    def close(self) -> None:
        self.pages.append((0, ["closed"]))


class _Unborn(_Kept):
    @override
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        raise OSError("the server is gone\nand more")


class _Forgetful(_Kept):
    @override
    def write(self, step: int, named: Mapping[str, float]) -> None:
        raise RuntimeError("the disk is full")


class _Endless(_Kept):
    @override
    def close(self) -> None:
        time.sleep(5)


def _offer(monkeypatch: pytest.MonkeyPatch, trackers: dict[str, Any]) -> None:
    for module in (tracker, writer):
        monkeypatch.setattr(module, "find_tracker", trackers.__getitem__)


_STAYS = "training continues without it, and the run folder has all metrics"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (_Unborn, f"x could not start (OSError: the server is gone); {_STAYS}"),
        (_Forgetful, f"x could not write (RuntimeError: the disk is full); {_STAYS}"),
        (_Endless, f"x had not written everything 0.2 s after the last step; {_STAYS}"),
    ],
)
def test_a_tracker_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, said: str) -> None:
    """All steps are made, one sentence is written down, and the other tracker has everything."""
    _offer(monkeypatch, {"x": kind, "y": _Kept})
    monkeypatch.setattr(writer, "TRACKER_TIMEOUT_SECONDS", 0.2 if kind is _Endless else SOON)
    with running(Line(), tmp_path, log={"every": 1, "to": ["x", "y"]}) as run:
        run.task.train(run)
        assert run.done == 3
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    assert [row["said"] for row in rows if row["event"] == "tracker"] == [said]
    names = ["flops_per_second", "loss", "lr", "norm", "samples", "samples_per_second", "seconds"]
    assert _Kept.pages == [(1, ["flops", *names]), (2, names), (3, names), (0, ["closed"])]


def test_a_slow_tracker_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tracker writes while the run goes on."""

    class Slow(_Kept):
        @override
        def write(self, step: int, named: Mapping[str, float]) -> None:
            assert written.wait(SOON)
            super().write(step, named)

    written = threading.Event()
    _offer(monkeypatch, {"x": Slow})
    trackers = TrackerWriter(("x",), tmp_path, 0)
    for step in range(5):
        trackers.write(step, {"loss": 1.0})
    assert Slow.pages == []
    written.set()
    trackers.close()
    assert Slow.pages == [(step, ["loss"]) for step in range(5)] + [(0, ["closed"])]


def test_the_last_numbers_of_a_run_that_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the run; the tracker is closed."""

    class Interrupted(Line):
        @override
        def train(self, run: Run) -> None:
            for local_batch in run.batches():
                signal.raise_signal(signal.SIGTERM)
                run.step(local_batch)

    _offer(monkeypatch, {"x": _Kept})
    with pytest.raises(Stopped), running(Interrupted(), tmp_path, log={"every": 1, "to": ["x"]}) as run:
        run.task.train(run)
    assert [step for step, _ in _Kept.pages] == [1, 0]


def test_other_ranks_have_none(tmp_path: Path) -> None:
    """Not even the name is looked at: rank 0's machine may be the only one that has the library."""
    TrackerWriter(("nobody",), tmp_path, 1).write(1, {"loss": 1.0})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_from_outside_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry point is enough; it gets the config and the numbers."""
    monkeypatch.syspath_prepend(TOY)
    assert tracker.TRACKERS.names() == ["lines", "mlflow", "tensorboard", "wandb"]
    with running(Line(), tmp_path, log={"every": 3, "to": ["lines"]}) as run:
        run.task.train(run)
    assert (tmp_path / "lines.txt").read_text("utf-8").splitlines() == [
        "total 4",
        "1 ['flops', 'flops_per_second', 'loss', 'lr', 'norm', 'samples', 'samples_per_second', 'seconds']",
        "3 ['flops_per_second', 'loss', 'lr', 'norm', 'samples', 'samples_per_second', 'seconds']",
    ]


def test_an_unknown_name() -> None:
    """Before any process, with what was probably meant."""
    given = load_given_config({"batch": {"total": 4}, "train": {"steps": 1}, "log": {"to": ["tensorboard", "wandbb"]}})
    with pytest.raises(ConfigError) as e:
        check_names(given)
    assert str(e.value) == (
        "the config: log.to: no tracker 'wandbb'; did you mean 'wandb'? known: mlflow, tensorboard, wandb"
    )


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that installs it is named."""
    monkeypatch.setattr("unipar.utils.entry_points.find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(BackendNotInstalled) as e:
        tracker.require_tracker("mlflow")
    assert str(e.value) == (
        "log.to: mlflow needs mlflow, sqlalchemy, alembic, not installed here: pip install 'unipar[mlflow]'"
    )
