"""Backends by name, strategies by their spelling, and every reason why a config cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.backend import checks, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.errors import BackendNotFound, ConfigError, Unsupported


def _config(**sections: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8, "micro": 2}, "train": {"steps": 1}, **sections})


def _strategy(text: str) -> Strategy:
    return strategies.require_strategy(Strategy.parse(text))


def test_strategies_of_each() -> None:
    """Strategies without a variant come first, in the order of `SHARDS`."""
    patterns = ("single", "native/*", "deepspeed/*", "horovod", "accelerate")
    assert [str(c) for c in strategies.expand_strategy_patterns(patterns)] == [
        "single", "native/nothing", "native/optimizer", "native/gradients", "native/parameters", "deepspeed/nothing",
        "deepspeed/optimizer", "deepspeed/gradients", "deepspeed/parameters", "horovod/nothing", "accelerate/nothing",
    ]  # fmt: skip
    assert [str(c) for c in strategies.strategies_of_backend(registry.find_backend("accelerate")) if c.variant] == [
        "accelerate/optimizer+zero", "accelerate/gradients+zero", "accelerate/parameters+zero"
    ]  # fmt: skip
    assert "deepspeed/gradients+library" in [str(c) for c in strategies.expand_strategy_patterns(("*",))]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("native/everything", ConfigError,
         "'native/everything' is not a strategy: write backend/shard or backend/shard+variant, where shard is one of "
         "nothing, optimizer, gradients, parameters (a bare backend means /nothing)"),
        ("horovod/gradients", Unsupported,
         "horovod/gradients: there is no such strategy; horovod has: horovod/nothing"),
        ("horovod/nothing+dp", Unsupported,
         "horovod/nothing+dp: horovod has no variant 'dp'; its strategies: horovod/nothing"),
        ("deepspeed/nothing+library", Unsupported,
         "deepspeed/nothing+library: there is no such strategy; deepspeed has: deepspeed/nothing, deepspeed/optimizer, "
         "deepspeed/gradients, deepspeed/parameters, deepspeed/optimizer+library, deepspeed/gradients+library, "
         "deepspeed/parameters+library"),
        ("hororod", BackendNotFound,
         "no backend 'hororod'; did you mean 'horovod'? known: accelerate, deepspeed, horovod, native, single"),
    ],
)  # fmt: skip
def test_strategies_that_do_not_exist(text: str, kind: type[Exception], message: str) -> None:
    """The error for an unknown strategy or backend lists the known ones."""
    with pytest.raises(kind) as e:
        _strategy(text)
    assert str(e.value) == message


def test_short_names() -> None:
    """Each names a strategy wherever one is named, with axes too; a name of a backend stays that."""
    patterns = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "fsdp2+tensor2", "horovod", "single")
    assert [str(c) for c in strategies.expand_strategy_patterns(patterns)] == [
        "native/nothing", "native/parameters", "deepspeed/nothing", "deepspeed/optimizer", "deepspeed/gradients",
        "deepspeed/parameters", "native/parameters+tensor2", "horovod/nothing", "single",
    ]  # fmt: skip
    strategy, named = strategies.named_strategy(_config(), "zero2")
    assert str(strategy) == "deepspeed/gradients"
    assert named == {"backend": "deepspeed", "parallel.shard": "gradients"}


def test_a_short_name_is_no_backend() -> None:
    """The sentence says which keys the name stands for."""
    data: dict[str, Any] = {"backend": "fsdp2"}
    assert list(checks._name_sentences(data, {})) == [  # pyright: ignore[reportPrivateUsage]
        "backend: 'fsdp2' is a strategy; write backend: native and parallel: {shard: parameters}"
    ]


def test_a_variant_is_its_options() -> None:
    """A strategy with a variant sets the variant's option; a strategy without one removes the option."""
    library = strategies.config_in_strategy(_config(), _strategy("deepspeed/gradients+library"))
    assert library.options == {"deepspeed": {"buckets": "library"}}
    assert str(strategies.strategy_of(library)) == "deepspeed/gradients+library"
    assert (
        str(strategies.strategy_of(strategies.config_in_strategy(library, _strategy("deepspeed/optimizer"))))
        == "deepspeed/optimizer"
    )


def test_an_option_that_contradicts_the_strategy() -> None:
    """An option and a strategy that contradict each other are refused."""
    config = _config(options={"deepspeed": {"buckets": "scaled"}})
    with pytest.raises(ConfigError) as e:
        strategies.config_in_strategy(config, _strategy("deepspeed/gradients+library"))
    assert str(e.value) == (
        "options.deepspeed.buckets: 'scaled' contradicts the strategy deepspeed/gradients+library, "
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
    config = strategies.config_in_strategy(_config(batch=batch, parallel={"data": 2}), _strategy("single"))
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
         "single: parallel.data: 2 contradicts the strategy: single is one process"),
    ],
)  # fmt: skip
def test_refusals(backend: str, sections: dict[str, Any], message: str) -> None:
    """Each limit of a strategy is a sentence, known before any process starts."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(_config(backend=backend, **sections))
    assert str(e.value) == message


def test_several_reasons_are_all_told() -> None:
    """One error lists all reasons."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(_config(backend="single", parallel={"data": 2, "shard": "optimizer"}))
    assert e.value.reasons == (
        "parallel.shard: optimizer is not available; single has nothing",
        "parallel.data: 2 contradicts the strategy: single is one process",
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
    why = registry.why_not_installed(registry.find_backend("horovod"))
    assert why == "backend 'horovod' needs horovod, not installed here: unipar install horovod"
