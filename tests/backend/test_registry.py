"""Backends by name, cells by their spelling, and every reason why a config cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.backend import checks, registry
from unipar.backend import offered_cells as cells
from unipar.config import Cell, Config
from unipar.errors import BackendNotFound, BackendNotInstalled, ConfigError, Unsupported


def _config(**sections: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8, "micro": 2}, "train": {"steps": 1}, **sections})


def _cell(text: str) -> Cell:
    return cells.require_cell(Cell.parse(text))


def test_cells_of_each() -> None:
    """Cells without a variant come first, in the order of `SHARDS`."""
    patterns = ("single", "native/*", "deepspeed/*", "horovod", "accelerate")
    assert [str(c) for c in cells.expand_cell_patterns(patterns)] == [
        "single", "native/nothing", "native/optimizer", "native/gradients", "native/parameters", "deepspeed/nothing",
        "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters", "horovod/nothing", "accelerate/nothing",
    ]  # fmt: skip
    assert [str(c) for c in cells.cells_of_backend(registry.find_backend("accelerate")) if c.variant] == [
        "accelerate/optimizer+zero", "accelerate/gradients+zero", "accelerate/parameters+zero"
    ]  # fmt: skip
    assert "deepspeed/gradients+library" in [str(c) for c in cells.expand_cell_patterns(("*",))]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("native/everything", ConfigError,
         "'native/everything' is not a cell: write backend/shard or backend/shard+variant, where shard is one of "
         "nothing, optimizer, gradients, parameters (a bare backend means /nothing)"),
        ("horovod/gradients", Unsupported,
         "horovod/gradients: there is no such cell; horovod has: horovod/nothing"),
        ("horovod/nothing+dp", Unsupported,
         "horovod/nothing+dp: horovod has no variant 'dp'; its cells: horovod/nothing"),
        ("deepspeed/nothing+library", Unsupported,
         "deepspeed/nothing+library: there is no such cell; deepspeed has: deepspeed/nothing, deepspeed/optimizer, "
         "deepspeed/gradients, deepspeed/parameters, deepspeed/optimizer+library, deepspeed/gradients+library, "
         "deepspeed/parameters+library"),
        ("hororod", BackendNotFound,
         "no backend 'hororod'; did you mean 'horovod'? known: accelerate, deepspeed, horovod, native, single"),
    ],
)  # fmt: skip
def test_cells_that_do_not_exist(text: str, kind: type[Exception], message: str) -> None:
    """The error for an unknown cell or backend lists the known ones."""
    with pytest.raises(kind) as e:
        _cell(text)
    assert str(e.value) == message


def test_a_variant_is_its_options() -> None:
    """A cell with a variant sets the variant's option; a cell without one removes the option."""
    library = cells.config_in_cell(_config(), _cell("deepspeed/gradients+library"))
    assert library.options == {"deepspeed": {"buckets": "library"}}
    assert str(cells.cell_of(library)) == "deepspeed/gradients+library"
    assert str(cells.cell_of(cells.config_in_cell(library, _cell("deepspeed/optimizer")))) == "deepspeed/optimizer"


def test_an_option_that_contradicts_the_cell() -> None:
    """An option and a cell that contradict each other are refused."""
    config = _config(options={"deepspeed": {"buckets": "scaled"}})
    with pytest.raises(ConfigError) as e:
        cells.config_in_cell(config, _cell("deepspeed/gradients+library"))
    assert str(e.value) == (
        "options.deepspeed.buckets: 'scaled' contradicts the cell deepspeed/gradients+library, "
        "which sets it to 'library'"
    )


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"total": 8, "micro": 2}, (8, 2, 4)),
        ({"total": 8, "accumulate": 2}, (8, 2, 4)),
        ({"micro": 2, "accumulate": 2}, (8, 2, 4)),
        ({"total": 8}, (8, 4, 2)),
    ],
)
def test_single_has_the_same_microbatches(batch: dict[str, int], sizes: tuple[int, int, int]) -> None:
    """One process computes the microbatches of two ranks one after another."""
    config = cells.config_in_cell(_config(batch=batch, parallel={"data": 2}), _cell("single"))
    settled = config.batch.settle(1)
    assert (settled.total, settled.micro, settled.accumulate) == sizes
    assert config.parallel.data == 1


@pytest.mark.parametrize(
    ("backend", "sections", "message"),
    [
        ("native", {"train": {"steps": 1, "precision": "bf16-master"}},
         "native/nothing: train.precision: bf16-master is not available: DDP, as nn.DataParallel, keeps one copy of "
         "the parameters, so there is no fp32 master beside bf16 ones; use another shard, or deepspeed/*"),
        ("native", {"parallel": {"data": 4, "shard_over": 2}},
         "native/nothing: parallel.shard_over: 2 is not available here, only in native/optimizer, native/gradients, "
         "native/parameters"),
        ("deepspeed", {"train": {"steps": 1, "precision": "fp64"}, "parallel": {"shard": "gradients"}},
         "deepspeed/gradients: train.precision: fp64 is not available: ZeRO keeps its masters in fp32; use "
         "deepspeed/nothing, native/* or fp32"),
        ("horovod", {"train": {"steps": 1, "precision": "bf16-master"}},
         "horovod/nothing: train.precision: bf16-master is not available: Horovod has no bf16 tensors; use bf16-mixed, "
         "native/parameters or deepspeed/*"),
        ("deepspeed", {"train": {"steps": 1, "precision": "fp16"}, "device": "cpu"},
         "deepspeed/nothing: train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"),
        ("accelerate", {"parallel": {"shard": "optimizer"}},
         "accelerate/optimizer: parallel.shard: optimizer is not available; accelerate has nothing, "
         "optimizer (with options.accelerate.through: deepspeed), gradients, parameters"),
        ("accelerate", {"options": {"accelerate": {"through": "deepspeed"}}},
         "accelerate/nothing: options.accelerate.through: deepspeed has no effect, as nothing is split; leave it out"),
        ("accelerate", {"train": {"steps": 1, "precision": "fp64"}, "parallel": {"shard": "gradients"},
                        "options": {"accelerate": {"through": "deepspeed"}}},
         "accelerate/gradients+zero: train.precision: fp64 is not available: ZeRO keeps its masters in fp32; use "
         "deepspeed/nothing, native/* or fp32"),
        ("deepspeed", {"options": {"deepspeed": {"buckets": "library"}}},
         "deepspeed/nothing: options.deepspeed.buckets: library has no effect, as nothing is split; leave it out"),
        ("single", {"parallel": {"data": 2}},
         "single: parallel.data: 2 contradicts the cell: single is one process"),
    ],
)  # fmt: skip
def test_refusals(backend: str, sections: dict[str, Any], message: str) -> None:
    """Each limit of a cell is a sentence, known before any process starts."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(_config(backend=backend, **sections))
    assert str(e.value) == message


def test_several_reasons_are_all_told() -> None:
    """One error lists all reasons."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(_config(backend="single", parallel={"data": 2, "shard": "optimizer"}))
    assert e.value.reasons == (
        "parallel.shard: optimizer is not available; single has nothing",
        "parallel.data: 2 contradicts the cell: single is one process",
    )


def test_a_library_that_another_goes_through_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing DeepSpeed is named if Accelerate is to use it."""
    monkeypatch.setattr("unipar.utils.entry_points.find_spec", lambda name: None if name == "deepspeed" else name)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    through = _config(
        backend="accelerate", parallel={"shard": "gradients"}, options={"accelerate": {"through": "deepspeed"}}
    )
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(through)
    assert str(e.value) == (
        "accelerate/gradients+zero: options.accelerate.through: deepspeed: backend 'deepspeed' needs deepspeed, not "
        "installed here: pip install 'unipar[deepspeed]'"
    )


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a backend that is not installed names the command that installs it."""
    monkeypatch.setattr("unipar.utils.entry_points.find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(BackendNotInstalled) as e:
        registry.load_backend("horovod")
    assert str(e.value) == "backend 'horovod' needs horovod, not installed here: unipar install horovod"
