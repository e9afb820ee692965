"""A loss across the batch: what it gives in one process, what it leaves unchanged, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.run_logs import step_losses
from tests.support.running import running
from unipar.errors import TaskError, UniparError
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog
from unipar.task.features import FeatureColumns
from unipar.training.losses.sample_rows import SampleRows


class Spread(unipar.Task):
    """The variance of the outputs over the whole batch, which no microbatch knows."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int]] = []
        """For each call of `features`: whether gradients are recorded, and the number of samples."""

        self.seen: list[Tensor] = []

    @override
    def model(self) -> Any:
        return nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Dropout(0.5), nn.Linear(1, 1, bias=False))

    @override
    def data(self) -> Any:
        return TensorDataset(torch.arange(1.0, 13.0)[:, None])

    @override
    def features(self, model: Any, batch: Any) -> Any:
        self.calls.append((torch.is_grad_enabled(), len(batch[0])))
        return (model(batch[0]), batch[0].long())

    @override
    def loss_across(self, features: Any) -> Tensor:
        out, samples = features
        self.seen.append(samples.flatten())
        return out.var()


class Line(Spread):
    """The same of three times the sample."""

    @override
    def model(self) -> Any:
        line = nn.Linear(1, 1, bias=False)
        nn.init.constant_(line.weight, 3.0)
        return line


def _refused(task: unipar.Task, folder: Path, **sections: Any) -> str:
    with pytest.raises(UniparError) as e, running(task, folder, **sections) as run:
        task.train(run)
    assert isinstance(e.value, TaskError)
    return str(e.value)


def test_each_microbatch_is_computed_twice(tmp_path: Path) -> None:
    """First all without gradients, then each with them; the loss sees the global batch once, in the samples' order."""
    task = Spread()
    with running(task, tmp_path, data={"shuffle": False}) as run:
        task.train(run)
    assert task.calls == ([(False, 2)] * 2 + [(True, 2)] * 2) * 3
    assert [s.tolist() for s in task.seen] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


def test_the_update_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """A step of SGD on the variance of 3 x over all samples, by hand: its gradient is 2 w var(x) = 6 var(x)."""
    task = Line()
    with running(task, tmp_path, batch={"total": 12, "micro": 3}, train={"steps": 1, "optimizer": _SGD}) as run:
        task.train(run)
        weight = next(run.parts["model"].module.parameters()).item()
    variance = 13.0
    assert weight == pytest.approx(3.0 - 0.01 * 6.0 * variance, rel=1e-6)
    assert step_losses(tmp_path) == [(1, pytest.approx(9.0 * variance, rel=1e-6))]


_SGD = {"name": "sgd", "lr": 0.01}


def test_buffers_count_a_batch_once(tmp_path: Path) -> None:
    """Running statistics are those of the second pass alone: as many batches as there are microbatches."""
    task = Spread()
    with running(task, tmp_path) as run:
        task.train(run)
        counted: Any = run.parts["model"].module[0].num_batches_tracked  # pyright: ignore[reportIndexIssue]
    assert int(counted) == 6


def test_the_cost_is_told(tmp_path: Path) -> None:
    """A forward more for a forward and two products in the backward: of a single linear layer a third or a half."""

    class Wide(Spread):
        @override
        def model(self) -> Any:
            return nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1))

    task = Wide()
    with running(task, tmp_path) as run:
        task.train(run)
    said = [row["said"] for row in RunLog.read(run_log_path(tmp_path, 0)) if row["event"] == "work"]
    # per sample 2 (8 + 64 + 8) forward; backward twice that but for the first layer's input: 2 x 160 - 16
    assert said == [
        "features of the whole batch were computed first, without gradients: 640 operations more, 34% of the step's"
    ]


def test_the_default_metric_is_the_loss_of_all_validation_samples(tmp_path: Path) -> None:
    """Whatever the batches are: the variance of 3 x over twelve samples."""

    class Evaluated(Line):
        @override
        def validation(self) -> Any:
            return self.data()

    with running(Evaluated(), tmp_path) as run:
        assert run.evaluate() == {"loss": pytest.approx(117.0, rel=1e-6)}


class _Weighted(Spread):
    @override
    def weight(self, batch: Any) -> float:
        return 1.0


class _Bare(Spread):
    loss_across = unipar.Task.loss_across


class _Detached(Spread):
    @override
    def loss_across(self, features: Any) -> Tensor:
        return features[0].detach().var()


class _Rows(Spread):
    @override
    def loss_across(self, features: Any) -> Tensor:
        return features[0]


class _Random(Spread):
    @override
    def features(self, model: Any, batch: Any) -> Any:
        self.calls.append((True, 0))
        return (model(batch[0]) + 10.0 * len(self.calls), batch[0].long())


class _Scalar(Spread):
    @override
    def features(self, model: Any, batch: Any) -> Any:
        return (model(batch[0]), model[-1].weight)


class _Words(Spread):
    @override
    def features(self, model: Any, batch: Any) -> Any:
        return (model(batch[0]), "words")


class _Empty(Spread):
    @override
    def features(self, model: Any, batch: Any) -> Any:
        return []


class _Changing(Spread):
    @override
    def features(self, model: Any, batch: Any) -> Any:
        self.calls.append((True, 0))
        return model(batch[0]).expand(-1, len(self.calls))


@pytest.mark.parametrize(
    ("task", "sections", "message"),
    [
        (_Weighted, {}, "the task has weight(batch) and loss_across(features): a loss of the full batch at once is not "
         "a mean over microbatches; weigh samples in loss_across, by a column of features, and leave weight out"),
        (_Bare, {}, "the task has no loss_across(): a loss across the batch needs features(model, batch) and "
         "loss_across(features)"),
        (Spread, {"backend": "native", "train": {"steps": 2, "local_steps": 2, "optimizer": _SGD}},
         "train.local_steps: 2 lets every rank take steps by itself, and loss_across() compares the samples of all "
         "ranks in every step: leave local_steps out"),
        (_Detached, {}, "loss_across() returned a loss that does not depend on the features: compute it from them, "
         "without detach() or torch.no_grad()"),
        (_Rows, {}, "loss_across() returned a tensor of shape (4, 1); return the loss of the full batch as a scalar "
         "tensor"),
        (_Random, {}, "features() gave other values when microbatch 0 was computed again, with gradients (tensor 0 of "
         "them): it must be the same in both calls; draw random numbers from PyTorch's generators only, and let "
         "nothing of the first call change the second"),
        (_Scalar, {}, "features() returned a tensor of shape (1, 1) for a batch of 2 samples; return one row for each "
         "sample (of a single number, such as a trained temperature: expand it to as many rows, or multiply it into "
         "the features)"),
        (_Words, {}, "features() returned a str; return tensors with one row for each sample of the batch, alone or in "
         "lists, tuples and dicts"),
        (_Empty, {}, "features() returned no tensor; return those that loss_across(features) compares"),
        (_Changing, {}, "features() returned float32 [2] for one microbatch and float32 [1] for another: return the "
         "same tensors for every batch, of rows of one shape, or give each sample a column's padding"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, task: type[Spread], sections: dict[str, Any], message: str) -> None:
    """What cannot be a loss across the batch is refused with the reason and the way out."""
    assert _refused(task(), tmp_path, **sections) == message


def test_rows_of_one_rank_are_in_order(tmp_path: Path) -> None:
    """Each microbatch finds its own rows, and one that does not count has none."""
    with running(Spread(), tmp_path) as run:
        rows = SampleRows(run.world, [2, 0, 3])
    assert (rows.total, rows.own) == (5, [slice(0, 2), slice(2, 2), slice(2, 5)])
    assert rows.gather(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_features_are_widened() -> None:
    """The loss is computed in fp32, whatever the features' dtype; fp64 and whole numbers stay."""
    found = FeatureColumns.of({"a": torch.ones(2, dtype=torch.bfloat16), "b": [torch.ones(2, 3), torch.ones(2).long()]})
    nested = found.nest(found.columns)
    assert (nested["a"].dtype, nested["b"][1].dtype) == (torch.float32, torch.int64)
    wide = FeatureColumns.of(torch.ones(2, dtype=torch.float64))
    assert wide.nest(wide.columns).dtype == torch.float64
