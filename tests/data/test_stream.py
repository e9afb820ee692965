"""Streams: each sample once where it can be counted, equal batches in all worlds, errors as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from tests.support.running import running
from tests.support.streams import Counted, Noisy, Numbers, Sharded, Streamed
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.cli.commands.config.explain import explain_config
from unipar.config import Config, Strategy
from unipar.config.config_source import load_config_file, load_given_config
from unipar.config.settled import SettledConfig
from unipar.conversion.export import export_script
from unipar.data.dataset import training_data_source
from unipar.data.order import MicrobatchPlan
from unipar.data.stream import STREAM_PROMISES, digest_sample, take_shard
from unipar.data.stream_loader import StreamLoader
from unipar.distributed.place import Place
from unipar.distributed.world import World, leave_current_world
from unipar.errors import ConfigError, TaskError, UniparError
from unipar.launcher.processes.group import WorkerGroup
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task.run import Position
from unipar.verification.worker.fixed_stream import fix_stream_samples

pytestmark = pytest.mark.forked

Step = list[tuple[Any, MicrobatchPlan]]


def _alone(rank: int, size: int) -> World:
    """Return the world of one rank without the others, for code that needs no collective."""
    place = Place(rank=rank, size=size, local_rank=rank, local_size=size, launcher="unipar")
    return World(place, torch.device("cpu"), None)


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    yield
    leave_current_world()


def _stream(data: Any, rank: int, size: int, total: int = 4, accumulate: int = 1, **keys: Any) -> StreamLoader:
    made = {"batch": {"total": total, "accumulate": accumulate}, "train": {"steps": 1}, "data": keys}
    config = Config.model_validate(made)
    sizes = config.batch.settle(size)
    return StreamLoader(training_data_source(data, None, default_collate, config, sizes), sizes, _alone(rank, size), 7)


def _steps(stream: StreamLoader, steps: int, start: int = 0) -> list[Step]:
    return list(islice(stream.batches(start), steps))


def _read(steps: list[Step]) -> list[list[float]]:
    """Return the samples that count, by step."""
    return [[x for batch, plan in step if plan.weight for x in batch.flatten().tolist()] for step in steps]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_worlds_train_on_the_same_global_batches(size: int, accumulate: int, workers: int) -> None:
    """Two epochs read each of ten samples once, in equal batches; weights of a batch add up to one."""
    ranks = [_steps(_stream(Numbers(), rank, size, accumulate=accumulate, workers=workers), 6) for rank in range(size)]
    for step, wanted in enumerate([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2):
        plans = [plan for rank in ranks for _, plan in rank[step]]
        assert sorted(x for rank in ranks for x in _read(rank)[step]) == wanted
        assert sum(plan.weight for plan in plans) == pytest.approx(1.0, abs=1e-15)
        assert sorted(key for plan in plans if plan.weight for key in plan.keys) == [(step // 3, x) for x in wanted]
        assert all(len(rank[step]) == accumulate for rank in ranks)


def test_an_empty_share_is_a_real_sample_of_weight_zero() -> None:
    """Ranks without a sample in the last batch read one that does not count."""
    last = [_steps(_stream(Numbers(), rank, 4), 3)[2] for rank in range(4)]
    assert [(batch.tolist(), plan.weight) for ((batch, plan),) in last] == [
        ([8.0], 0.5), ([9.0], 0.5), ([8.0], 0.0), ([8.0], 0.0)
    ]  # fmt: skip


def test_each_rank_knows_the_sizes_of_all_ranks() -> None:
    """Nobody has to ask the others how a global batch of four, or the last one of two, was cut."""
    ranks = [_steps(_stream(Numbers(), rank, 2, accumulate=2), 3) for rank in range(2)]
    assert [[plan.of_ranks for _, plan in step] for rank in ranks for step in rank] == 2 * [
        [[1, 1], [1, 1]], [[1, 1], [1, 1]], [[1, 1], [0, 0]]
    ]  # fmt: skip


def test_random_streams_do_not_depend_on_world_or_workers() -> None:
    """Order and noise depend on seed, epoch and position alone; epochs differ."""
    one = _read(_steps(_stream(Noisy(), 0, 1), 6))
    two = [_read(_steps(_stream(Noisy(), rank, 2, workers=2 * rank), 6)) for rank in range(2)]
    assert [a + b for a, b in zip(*two, strict=True)] == one
    assert sorted(x for step in one[:3] for x in step) != sorted(x for step in one[3:] for x in step)


@pytest.mark.parametrize("data", [Numbers, Counted])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_later_start_is_the_same_run(data: type[Numbers], workers: int) -> None:
    """A later start reads and skips earlier samples, with a len() or without."""
    whole = _read(_steps(_stream(data(), 1, 2), 8))
    for start in (1, 3, 5):
        late = _stream(data(), 1, 2, workers=workers)
        assert late.place(start) == divmod(start, 3)
        assert _read(_steps(late, 8 - start, start)) == whole[start:]
        assert late.place(8) == (2, 2)


def test_ragged() -> None:
    """An incomplete last batch is dropped, or refused with the numbers."""
    assert _read(_steps(_stream(Numbers(), 0, 1, last_batch="drop"), 3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    with pytest.raises(TaskError) as e:
        _steps(_stream(Numbers(), 0, 1, last_batch="error"), 3)
    assert str(e.value) == (
        "data.last_batch: 10 samples are 2 batches of 4 and 2 left over; choose keep or drop, or another batch.total"
    )
    assert len(_steps(_stream(Numbers(8), 0, 1, last_batch="error"), 4)) == 4


def test_epochs_need_a_length() -> None:
    """Epochs are converted to steps by len(); without it, the key is refused."""
    assert _stream(Counted(), 0, 1).steps(2) == 6
    assert _stream(Counted(), 0, 1, last_batch="drop").steps(2) == 4
    for stream, why in (
        (_stream(Numbers(), 0, 1), "has no len()"),
        (_stream(Sharded(), 0, 1, stream="shards"), "is read with data.stream: shards"),
    ):
        with pytest.raises(ConfigError) as e:
            stream.steps(2)
        assert str(e.value) == (
            f"train.epochs: data() returned a stream that {why}, so the number of steps in an epoch is unknown; "
            "give train.steps instead"
        )


class _Lying(Numbers):
    said: ClassVar[int] = 9

    def __len__(self) -> int:
        return self.said


class _Longer(_Lying):
    said = 11


_ONE_PASS = (torch.tensor(float(i)) for i in range(4))


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        (Numbers(0), {}, "data() has no samples"),
        (Numbers(3), {"last_batch": "drop"},
         "data.last_batch: drop leaves nothing: 3 samples do not fill one batch of 4"),
        (_Lying(), {}, "len() of the stream says 9 samples, but epoch 1 gave more than that"),
        (_Longer(), {}, "len() of the stream says 11 samples, but epoch 1 gave 10"),
        (_Longer(), {"workers": 2}, "len() of the stream says 11 samples, but epoch 1 gave 10"),
        (_ONE_PASS, {}, "the stream gave no samples in epoch 2: its __iter__ must start from the beginning each time"),
    ],
)  # fmt: skip
def test_what_a_stream_may_not_be(data: Any, keys: dict[str, Any], message: str) -> None:
    """A wrong stream is refused when it is read, with data workers and without."""
    with pytest.raises(TaskError) as e:
        _steps(_stream(data, 0, 1, **keys), 6)
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        (Numbers(), {"shuffle": True},
         "data.shuffle: true: data() returned a stream, whose order is its own; shuffle in its __iter__ (the "
         "generators are seeded by train.seed and the epoch), and leave the key out"),
        (TensorDataset(torch.ones(4)), {"stream": "whole"},
         "data.stream: whole: data() returned a map-style dataset, which is divided by index; leave the key out"),
        (Numbers(), {"stream": "shards"},
         "data.stream: shards: Numbers has no method shard(index, count) that returns a part of it; write one, set "
         "data.stream: own if it splits itself by rank and worker, or leave the key out"),
        (DataLoader(Numbers(), batch_size=3), {},
         "the DataLoader's batch_size is 3; it must be batch.total (4), batch.micro (4) or unset"),
        (DataLoader(Numbers(), batch_size=None), {},
         "the DataLoader has batch_size=None; unipar decides which samples are a batch: give batch_size instead"),
    ],
)  # fmt: skip
def test_keys_that_would_have_no_effect(data: Any, keys: dict[str, Any], message: str) -> None:
    """Keys without effect are refused: shuffle for streams, stream for datasets; shards need a method."""
    with pytest.raises(UniparError) as e:
        _stream(data, 0, 1, **keys)
    assert str(e.value) == message


def test_a_loader_over_a_stream() -> None:
    """A DataLoader's workers, collate_fn and drop_last are used for a stream."""
    stream = _stream(DataLoader(Numbers(), batch_size=4, num_workers=1, drop_last=True), 0, 1)
    assert (stream.source.settings.workers, stream.source.settings.last_batch) == (1, "drop")
    assert _read(_steps(stream, 3))[2] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks of a real world read of each stream of `tests.support.streams`."""
    run = tmp_path_factory.mktemp("streams")
    with WorkerGroup(run, 2, "tests.support.streams:play", environment=PYTHONPATH_VARIABLE, heartbeat=60.0) as workers:
        workers.wait()
    return [json.loads((run / f"read-{rank}.json").read_text("utf-8")) for rank in range(2)]


def _epochs(ranks: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Return the samples of each epoch that was read completely, of all ranks together."""
    found: dict[int, list[float]] = {}
    for steps in zip(*(rank[name]["seen"] for rank in ranks), strict=True):
        assert len({epoch for epoch, _, _ in steps}) == 1, "ranks are in different epochs"
        assert sum(weight for _, _, weight in steps) == pytest.approx(1.0, abs=1e-15)
        found.setdefault(steps[0][0], []).extend(x for _, seen, _ in steps for x in seen)
    return [sorted(found[epoch]) for epoch in sorted(found)][:-1]


@pytest.mark.parametrize("name", ["shards", "shards, workers", "own", "own, workers"])
def test_parts_are_read_once(ranks: list[dict[str, Any]], name: str) -> None:
    """Every epoch has each of eleven samples once, on two ranks with parts of different sizes."""
    epochs = _epochs(ranks, name)
    assert len(epochs) >= 1
    assert epochs == [[float(n) for n in range(11)]] * len(epochs)


def test_parts_that_are_cut_off(ranks: list[dict[str, Any]]) -> None:
    """`drop` ends the epoch when a rank has no full share left."""
    assert _epochs(ranks, "shards, dropped") == [[0, 1, 2, 3, 4, 5, 6, 7]] * 4


def test_parts_from_a_later_step(ranks: list[dict[str, Any]]) -> None:
    """A later start reads and skips earlier samples."""
    for rank in ranks:
        assert [seen for _, seen, _ in rank["shards, dropped"]["seen"]][5:] == rank["shards, dropped"]["later"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shards, refused",
         "data.last_batch: the ranks' parts of epoch 1 end at different steps, or within a batch (batch 3 has 3 of 4 "
         "samples); choose keep or drop"),
        ("shards that lose some",
         "len() of the stream says 11 samples, but its 2 shards gave 10 in epoch 1: shard(index, count) must give each "
         "sample to one of them"),
    ],
)  # fmt: skip
def test_parts_that_are_refused(ranks: list[dict[str, Any]], name: str, message: str) -> None:
    """Parts that do not fit are refused on all ranks together."""
    assert [rank[name] for rank in ranks] == [{"error": message}] * 2


@pytest.mark.parametrize("name", ["one that splits itself, unsaid", "another length on one rank"])
def test_ranks_that_do_not_see_the_same(ranks: list[dict[str, Any]], name: str) -> None:
    """Different streams on two ranks are found by the rank that comes last, whose error ends the run."""
    said = {rank[name].get("error") for rank in ranks} - {None}
    assert said
    assert said <= {
        f"the stream is not the same on ranks {a} and {b}, and data.stream: whole takes each rank's samples from one "
        "stream; if it splits itself by rank, set data.stream: own"
        for a, b in ((0, 1), (1, 0))
    }


def test_random_order_in_a_real_world(ranks: list[dict[str, Any]]) -> None:
    """A random order is the same on all ranks, and every number comes once."""
    for epoch in _epochs(ranks, "whole"):
        assert sorted(int(x) for x in epoch) == list(range(11))


def test_both_spellings_of_shard() -> None:
    """The arguments of `shard` may be named as unipar or as Hugging Face's datasets name them."""

    class Theirs(Numbers):
        def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Counted:
            return Counted(self.range.stop, index, num_shards)

    assert (
        list(take_shard(Sharded(5), 1, 2))
        == list(take_shard(Theirs(5), 1, 2))
        == [torch.tensor(1.0), torch.tensor(3.0)]
    )


def test_a_digest_tells_samples_apart() -> None:
    """Digests differ by tensors, numbers and text, in any containers."""
    seen = [
        {"x": torch.ones(2), "y": 1}, {"x": torch.ones(2), "y": 2}, {"x": torch.zeros(2), "y": 1},
        [torch.ones(1, dtype=torch.bfloat16)], [torch.tensor(1j)], [torch.tensor(2j)], "a", ["a"], None,
    ]  # fmt: skip
    assert len({digest_sample(sample) for sample in seen}) == len(seen)
    assert digest_sample({"x": torch.ones(2), "y": 1}) == digest_sample(seen[0])


def test_a_run_over_a_stream(tmp_path: Path) -> None:
    """Epochs follow from len(), another stream is evaluated, and the run log says how the data is read."""
    with running(Streamed(kind="Counted"), tmp_path, train={"epochs": 2}, eval={"every": 6}) as run:
        assert run.steps == 12
        samples = [local_batch.samples for local_batch in run.batches() if run.step(local_batch)]
        weight, bias = (piece.tensor.item() for piece in run.engine.pieces() if piece.kind == "weight")
        assert run.position == Position(step=12, epoch=2, batch=0)
    assert samples == [4, 4, 4, 4, 4, 2] * 2
    rows = list(RunLog.read(run_log_path(tmp_path, 0)))
    (said,) = (row["said"] for row in rows if row["event"] == "data")
    assert said.startswith("a stream: every rank and worker reads the whole stream and keeps its own samples")
    errors = [((weight - 3) * x / 10 + bias) ** 2 for x in range(13)]
    last = [row for row in rows if row["event"] == "eval"][-1]
    assert last["loss"] == pytest.approx(sum(errors) / 13, rel=1e-5)


def test_an_evaluation_of_nothing(tmp_path: Path) -> None:
    """An empty validation stream is refused."""

    class Empty(Streamed):
        @override
        def validation(self) -> Any:
            return Numbers(0)

    with pytest.raises(TaskError, match=r"^validation\(\) has no samples$"), running(Empty(), tmp_path) as run:
        run.evaluate()


def test_explained(tmp_path: Path) -> None:
    """`explain --deep` shows how a stream is read, and that its order is its own."""
    file = tmp_path / "x.yaml"
    file.write_text(
        f"task: {{use: '{Path(__file__).parents[1]}/support/streams.py:Streamed', args: {{kind: Counted}}}}\n"
        "device: cpu\nparallel: {data: 2}\nbatch: {total: 4}\ntrain: {epochs: 2}\n",
        "utf-8",
    )
    made = explain_config(load_config_file(file), deep=True)
    told = {v.key: (v.value, v.origin) for v in (*made.values, *made.follows)}
    assert told["data.shuffle"] == (False, "the task's stream")
    assert told["stream"] == ("whole", STREAM_PROMISES["whole"])
    assert told["samples"] == (22, "the task's data(); 6 batches of 4 an epoch")
    assert told["train.steps"] == (12, "derived: epochs x batches an epoch = 2 x 6")


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"data": {"stream": "shards"}, "train": {"steps": 1}},
         "data.stream: shards gives each rank samples of its own, and verify needs the same ones in one process; "
         "verify with --set data.stream=whole"),
        ({"train": {"epochs": 1}},
         "train.epochs: verify uses the first samples of a stream and does not know its epochs; set train.steps"),
    ],
)  # fmt: skip
def test_streams_that_verify_refuses(sections: dict[str, Any], sentence: str) -> None:
    """`verify` refuses streams that it cannot give to one process."""
    config = Config.model_validate({"batch": {"total": 4}} | sections)
    settled = SettledConfig.of(config, Strategy("single"), 1, "cpu")
    with pytest.raises(ConfigError) as e:
        fix_stream_samples(Streamed(), settled, 3)
    assert str(e.value) == sentence


def test_export_refuses_a_stream(tmp_path: Path) -> None:
    """`export` refuses a stream, because a script divides samples by index."""
    file = tmp_path / "task.py"
    file.write_text(
        "import unipar\nfrom torch import nn\n\n\nclass Flow(unipar.Task):\n"
        "    def model(self):\n        return nn.Linear(1, 1)\n\n"
        "    def data(self):\n        return (x for x in range(9))\n\n"
        "    def loss(self, model, batch):\n        return model(batch[:, None].float()).mean()\n",
        "utf-8",
    )
    told = {"task": {"use": f"{file}:Flow"}, "batch": {"total": 4}, "train": {"steps": 1}, "device": "cpu"}
    with pytest.raises(TaskError) as e:
        export_script(load_given_config(told), "torchrun", tmp_path / "made")
    assert str(e.value) == (
        f"{file}:Flow: data() returns a stream, and a script supports map-style datasets only: export a task whose "
        "data() returns one"
    )
