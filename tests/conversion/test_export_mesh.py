"""Scripts of a pipeline that `unipar export` writes: without unipar they give the losses of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import FILE, FORGETS, HIDES, WORDS
from tests.support.forks import Forks
from tests.support.pipelined import Lines, Own, Texts
from unipar import Task, join
from unipar.config import config_source as source
from unipar.conversion.export import ExportResult, export_script
from unipar.errors import UniparError

BIN = Path(sys.executable).parent
PIPELINED = FILE.with_name("pipelined.py")
TOLD: dict[str, Any] = {**WORDS, "task": {"use": f"{PIPELINED}:Texts"}}
LINES: dict[str, Any] = {
    **WORDS,
    "task": {"use": f"{PIPELINED}:Lines"},
    "data": {"last_batch": "drop", "shuffle": False},
}
WORDS_OF_CUDA = {
    '"nccl"': '"gloo"',
    "    torch.cuda.set_device(device)\n": "",
    "    dist.destroy_process_group()\n": "    dist.destroy_process_group()\n    os._exit(0)\n",
    ".cuda()": "",
    "torch.cuda.get_rng_state": "torch.get_rng_state",
    "torch.cuda.set_rng_state": "torch.set_rng_state",
    ', int(os.environ["LOCAL_RANK"])': "",
    ", torch.cuda.current_device()": "",
    '"cuda"': '"cpu"',
}


def _alone(folder: Path, told: Mapping[str, Any] = TOLD, task: type[Task] = Texts) -> list[float]:
    """Return the losses of one process."""
    losses: list[float] = []
    changed = {"backend": "single", "parallel": {"data": 1}, "out": str(folder / "alone")}
    with join({**told, **changed}, task=task, overwrite=True) as run:
        for local_batch in run.batches():
            loss = run.step(local_batch).loss
            assert loss is not None
            losses.append(loss)
    return losses


def _run(made: ExportResult, ranks: int, folder: Path, forks: Forks) -> list[dict[str, Any]]:
    """Run a script where unipar is hidden, and return the rows of its log."""
    (folder / "start.py").write_text(HIDES + FORGETS, encoding="utf-8")
    for done in forks.ranks([str(folder / "start.py")], made.folder, {"OMP_NUM_THREADS": "1"}, size=ranks):
        assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (made.folder / "log.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({"data": 1, "schedule": "1f1b"}, 2),
        pytest.param({"data": 2, "shard": "parameters", "schedule": "gpipe"}, 4, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "shard": "optimizer", "schedule": "1f1b"}, 4, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "shard": "nothing", "schedule": "1f1b"}, 4, marks=pytest.mark.sweep),
        pytest.param({"data": 1, "pipeline": 4, "schedule": "1f1b"}, 4, marks=pytest.mark.sweep),
    ],
)
def test_a_pipeline_has_the_same_losses(parallel: dict[str, Any], ranks: int, tmp_path: Path, forks: Forks) -> None:
    """Ragged texts with weights, a matrix tied over stages, dropout in, before and behind blocks; unipar is hidden."""
    config = source.load_given_config({**TOLD, "parallel": {"pipeline": 2, **parallel}})
    made = export_script(config, "torchrun", tmp_path / "made")
    assert f"--nproc-per-node {ranks} train.py" in made.command
    rows = _run(made, ranks, tmp_path, forks)
    assert [row["loss"] for row in rows] == pytest.approx(_alone(tmp_path), rel=2e-6)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("parallel", "batch", "ranks"),
    [
        ({"data": 1, "schedule": "zerobubble"}, (8, 2), 2),
        pytest.param({"data": 1, "schedule": "interleaved"}, (8, 8), 2, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "schedule": "zerobubble"}, (8, 1), 4, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "schedule": "interleaved"}, (8, 1), 4, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "schedule": "interleaved", "shard": "optimizer"}, (8, 2), 4, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "schedule": "interleaved", "shard": "gradients"}, (8, 1), 4, marks=pytest.mark.sweep),
        pytest.param({"data": 2, "schedule": "interleaved", "shard": "parameters"}, (8, 2), 4, marks=pytest.mark.sweep),
    ],
)
def test_stages_in_turn_have_the_same_losses(
    parallel: dict[str, Any], batch: tuple[int, int], ranks: int, tmp_path: Path, forks: Forks
) -> None:
    """Two stages on each rank, hidden states of another shape in every other step; norms, too."""
    told = {**LINES, "parallel": {"pipeline": 2, **parallel}, "batch": {"total": batch[0], "micro": batch[1]}}
    made = export_script(source.load_given_config(told), "torchrun", tmp_path / "made")
    rows = _run(made, ranks, tmp_path, forks)
    assert [row["loss"] for row in rows] == pytest.approx(_alone(tmp_path, told, Lines), rel=2e-6)
    alone = [json.loads(line) for line in (tmp_path / "alone/rank-0.jsonl").read_text("utf-8").splitlines()]
    norms = [row["norm"] for row in alone if row["event"] == "step"]
    assert [row["norm"] for row in rows] == pytest.approx(norms, rel=2e-6)


@pytest.mark.parametrize(
    ("parallel", "firsts", "ranks"),
    [
        ({"data": 1, "schedule": "1f1b"}, "0, 1", 2),
        pytest.param(
            {"data": 2, "schedule": "interleaved", "shard": "parameters"}, "0, 1, 2, 3", 4, marks=pytest.mark.sweep
        ),
        pytest.param({"data": 2, "schedule": "gpipe", "shard": "optimizer"}, "0, 1", 4, marks=pytest.mark.sweep),
    ],
)
def test_groups_and_cuts_of_the_task(
    parallel: dict[str, Any], firsts: str, ranks: int, tmp_path: Path, forks: Forks
) -> None:
    """Each group keeps its rate on all stages, one of which has no parameter of some group."""
    told = {**LINES, "task": {"use": f"{PIPELINED}:Own"}, "parallel": {"pipeline": 2, **parallel}}
    made = export_script(source.load_given_config(told), "torchrun", tmp_path / "made")
    assert f"\nFIRSTS = ({firsts})  #" in (made.folder / "train.py").read_text("utf-8")
    rows = _run(made, ranks, tmp_path, forks)
    assert [row["loss"] for row in rows] == pytest.approx(_alone(tmp_path, told, Own), rel=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [{"schedule": "1f1b", "data": 2}, {"schedule": "zerobubble", "data": 1}])
def test_what_a_script_for_cuda_sends(parallel: dict[str, Any], tmp_path: Path, forks: Forks) -> None:
    """The words for CUDA are replaced by those for the CPU: a group for each direction, the state of the generator."""
    told = {**LINES, "parallel": {"pipeline": 2, **parallel}}
    made = export_script(source.load_given_config({**told, "device": "cuda"}), "torchrun", tmp_path / "made")
    text = (made.folder / "train.py").read_text("utf-8")
    for word, other in WORDS_OF_CUDA.items():
        text = text.replace(word, other)
    assert "cuda" not in text
    (made.folder / "train.py").write_text(text, encoding="utf-8")
    rows = _run(made, 2 * parallel["data"], tmp_path, forks)
    assert [row["loss"] for row in rows] == pytest.approx(_alone(tmp_path, told, Lines), rel=2e-6)


@pytest.mark.sweep
def test_stages_in_turn_need_one_shape(tmp_path: Path, forks: Forks) -> None:
    """Texts that are not padded alike end the script with a sentence."""
    told = {**LINES, "task": TOLD["task"], "parallel": {"data": 1, "pipeline": 2, "schedule": "interleaved"}}
    made = export_script(source.load_given_config(told), "torchrun", tmp_path / "made")
    with pytest.raises(AssertionError, match="microbatches of one shape in each step: pad them alike"):
        _run(made, 2, tmp_path, forks)


@pytest.mark.parametrize(("clip", "device"), [(0.5, "cpu"), (None, "cpu"), (0.5, "cuda")])
@pytest.mark.parametrize(
    ("schedule", "shard"),
    [
        *((schedule, shard) for schedule in ("1f1b", "gpipe", "interleaved") for shard in ("nothing", "optimizer")),
        ("zerobubble", "nothing"),
    ],
)
def test_a_script_is_clean(shard: str, schedule: str, clip: float | None, device: str, tmp_path: Path) -> None:
    """Linter and formatter have nothing to say."""
    parallel = {"data": 1, "pipeline": 2, "shard": shard, "schedule": schedule}
    told = {**(LINES if schedule in ("interleaved", "zerobubble") else TOLD), "parallel": parallel, "device": device}
    told["train"] = {"steps": 3, "clip": clip} if clip is None else TOLD["train"]
    folder = export_script(source.load_given_config(told), "torchrun", tmp_path / "made").folder
    for words in (
        ["check", "--isolated", "--select", "E,F,I,UP,B,RUF", "--ignore", "B905", "--line-length", "120"],
        ["format", "--isolated", "--line-length", "120", "--check"],
    ):
        command = [str(BIN / "ruff"), *words, *(file.name for file in folder.glob("*.py") if file.name != "task.py")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"parallel": {"data": 1, "pipeline": 4, "schedule": "interleaved"}, "data.last_batch": "drop"},
            "native/nothing+pipeline4+interleaved: parallel.pipeline: 8 stages (2 on each of 4 ranks, by interleaved) "
            "need a block each, and the model has 4; lower pipeline, take schedule 1f1b, or name smaller blocks in "
            "model.blocks",
        ),
        (
            {"parallel": {"data": 1, "pipeline": 2, "schedule": "zerobubble"}},
            "native/nothing+pipeline2+zerobubble: parallel.schedule: zerobubble needs microbatches of one shape, and "
            "data.last_batch: keep makes the last batch of an epoch smaller: set data.last_batch: drop, or take "
            "schedule 1f1b or gpipe",
        ),
        (
            {"parallel": {"data": 1, "pipeline": 9}},
            "native/nothing+pipeline9: parallel.pipeline: 9 stages need a block each, and the model has 4; lower "
            "pipeline, or name smaller blocks in model.blocks",
        ),
        (
            {
                "parallel": {"data": 1, "pipeline": 2},
                "task.use": f"{PIPELINED}:Own",
                "task.args": {"second": 2},
                "data": LINES["data"],
            },
            "cuts(2) returned []; it must return 1 blocks in their order, with which the second and each further stage "
            "begins",
        ),
    ],
)
def test_refused(change: Mapping[str, Any], sentence: str, tmp_path: Path) -> None:
    """Each with its reason, and nothing is written."""
    with pytest.raises(UniparError) as e:
        export_script(source.load_given_config(TOLD, change), "torchrun", tmp_path / "made")
    assert str(e.value) == sentence
    assert list(tmp_path.iterdir()) == []
