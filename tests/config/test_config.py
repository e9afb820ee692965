"""What a config means: arithmetic of the batch, strategies, choices by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from unipar.backend import checks
from unipar.backend.offered_strategies import (
    config_in_strategy,
    expand_strategy_patterns,
    require_strategy,
    strategy_of,
)
from unipar.config import BatchSizes, Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.config.sections.batch import Batch
from unipar.config.sections.optimizer import SGD, Adam, AdamW, Clip, LrScale
from unipar.config.sections.parallel import Parallel
from unipar.config.sections.schedule import Constant, Cosine, Linear
from unipar.config.sections.train import Train
from unipar.errors import BackendNotFound, ConfigError, Unsupported

GOOD: dict[str, Any] = {"batch": {"total": 32}, "train": {"steps": 1}}


def config(**changes: Any) -> Config:
    return load_given_config(GOOD, changes).config


@pytest.mark.parametrize(
    ("batch", "ranks", "sizes"),
    [
        (Batch(total=32), 1, BatchSizes(32, 32, 1, 1)),
        (Batch(total=32), 4, BatchSizes(32, 8, 1, 4)),
        (Batch(total=32, micro=4), 2, BatchSizes(32, 4, 4, 2)),
        (Batch(total=32, accumulate=4), 2, BatchSizes(32, 4, 4, 2)),
        (Batch(micro=4, accumulate=4), 2, BatchSizes(32, 4, 4, 2)),
        (Batch(total=32, micro=4, accumulate=4), 2, BatchSizes(32, 4, 4, 2)),
    ],
)
def test_any_two_give_the_third(batch: Batch, ranks: int, sizes: BatchSizes) -> None:
    """total = micro x accumulate x ranks, whichever is left out."""
    assert batch.settle(ranks) == sizes


def test_other_microbatches_of_the_same_total() -> None:
    """Those that divide a rank's share of the step."""
    sizes = BatchSizes(total=36, micro=6, accumulate=2, ranks=3)
    assert (sizes.local, sizes.possible_micros) == (12, [1, 2, 3, 4, 6, 12])
    assert sizes.with_micro(4) == BatchSizes(total=36, micro=4, accumulate=3, ranks=3)


@pytest.mark.parametrize(
    ("batch", "ranks", "sentence"),
    [
        (
            Batch(total=30, micro=4),
            2,
            "batch.total (30) is not a multiple of micro x data (4 x 2 = 8); the nearest totals are 24 and 32",
        ),
        (
            Batch(total=30, accumulate=4),
            1,
            "batch.total (30) is not a multiple of accumulate x data (4 x 1 = 4); the nearest totals are 28 and 32",
        ),
        (
            Batch(total=3),
            4,
            "batch.total (3) is not a multiple of accumulate x data (1 x 4 = 4); the smallest is 4",
        ),
        (
            Batch(total=32, micro=4, accumulate=2),
            2,
            "batch.total (32) is not micro x accumulate x data (4 x 2 x 2 = 16); leave one of the three out",
        ),
    ],
)
def test_what_does_not_divide(batch: Batch, ranks: int, sentence: str) -> None:
    """The error shows the arithmetic and the nearest way out."""
    with pytest.raises(ConfigError) as e:
        batch.settle(ranks)
    assert str(e.value) == sentence


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (
            {"micro": "auto"},
            "micro: auto keeps the total batch, and there is none; give total, the samples of one step",
        ),
        (
            {"total": 8, "micro": "auto", "accumulate": 2},
            "micro: auto decides how often to accumulate; leave out accumulate: 2, or give micro a number",
        ),
    ],
)
def test_a_microbatch_that_is_found(batch: dict[str, Any], sentence: str) -> None:
    """A microbatch divides a total that is given, and needs no other number."""
    with pytest.raises(ValidationError, match="micro: auto") as e:
        Batch.model_validate(batch)
    assert sentence in str(e.value)


def test_a_microbatch_that_is_not_found_yet_has_no_sizes() -> None:
    """A defect of ours is no sentence for users."""
    assert Batch(total=8, micro="auto").is_auto
    with pytest.raises(AssertionError, match="must be found by trial, or replaced, before a batch is settled"):
        Batch(total=8, micro="auto").settle(2)


@pytest.mark.parametrize(
    ("text", "strategy", "shown"),
    [
        ("native", Strategy("native"), "native/nothing"),
        ("native/parameters", Strategy("native", "parameters"), "native/parameters"),
        ("deepspeed/gradients+library", Strategy("deepspeed", "gradients", "library"), "deepspeed/gradients+library"),
        ("x+dp", Strategy("x", "nothing", "dp"), "x/nothing+dp"),
        ("single", Strategy("single"), "single"),
    ],
)
def test_strategies_are_spelled_one_way(text: str, strategy: Strategy, shown: str) -> None:
    """Parsed and printed; a bare backend splits nothing."""
    assert Strategy.parse(text) == strategy
    assert str(strategy) == shown
    assert Strategy.parse(shown) == strategy


def test_a_strategies_folder() -> None:
    """A slash would make two folders of it."""
    assert Strategy("deepspeed", "gradients", "library").slug == "deepspeed-gradients+library"


@pytest.mark.parametrize("text", ["", "/nothing", "native/", "native/everything", "native/nothing+", "+x"])
def test_what_is_no_strategy(text: str) -> None:
    """The sentence says how one is written."""
    with pytest.raises(ConfigError) as e:
        Strategy.parse(text)
    assert str(e.value) == (
        f"{text!r} is not a strategy: write backend/shard or backend/shard+variant, where shard is one of nothing, "
        "optimizer, gradients, parameters (a bare backend means /nothing)"
    )


@pytest.mark.parametrize(
    ("word", "shard"),
    [
        *(("ddp", "nothing"), ("zero0", "nothing"), ("zero1", "optimizer"), ("zero2", "gradients")),
        *(("zero3", "parameters"), ("fsdp", "parameters"), ("fsdp2", "parameters"), ("gradients", "gradients")),
    ],
)
def test_words_for_a_shard(word: str, shard: str) -> None:
    """The words that people have for a level of sharding are taken."""
    assert Parallel.model_validate({"shard": word}).shard == shard


def test_a_misspelt_shard() -> None:
    """The nearest one is named."""
    with pytest.raises(ConfigError) as e:
        Strategy.parse("native/nothin")
    assert str(e.value).endswith("(a bare backend means /nothing); did you mean 'nothing'?")


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        (
            "horovod/optimizer",
            Unsupported,
            "horovod/optimizer: there is no such strategy; horovod has: horovod/nothing",
        ),
        (
            "horovod/nothing+x",
            Unsupported,
            "horovod/nothing+x: horovod has no variant 'x'; its strategies: horovod/nothing",
        ),
        ("natve", BackendNotFound, "no backend 'natve'; did you mean 'native'? known: "),
    ],
)
def test_strategies_that_do_not_exist(text: str, error: type[Exception], sentence: str) -> None:
    """Refused with those that do."""
    with pytest.raises(error) as e:
        require_strategy(Strategy.parse(text))
    assert str(e.value).startswith(sentence)


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ({}, AdamW()),
        ({"lr": 0.1}, AdamW(lr=0.1)),
        ({"name": "sgd", "momentum": 0.9}, SGD(momentum=0.9)),
        ({"name": "adam", "betas": [0.8, 0.9]}, Adam(betas=(0.8, 0.9))),
    ],
)
def test_an_optimizer_is_chosen_by_name(optimizer: dict[str, Any], made: object) -> None:
    """adamw without a name; each with its own keys."""
    assert config(train={"optimizer": optimizer}).train.optimizer == made


@pytest.mark.parametrize(
    ("schedule", "made"),
    [
        ({}, Constant()),
        ({"warmup": 3}, Constant(warmup=3)),
        ({"name": "linear", "min_lr_ratio": 0.5}, Linear(min_lr_ratio=0.5)),
        ({"name": "cosine", "warmup": 3}, Cosine(warmup=3)),
    ],
)
def test_a_schedule_is_chosen_by_name(schedule: dict[str, Any], made: object) -> None:
    """constant without a name."""
    assert config(train={"steps": 9, "schedule": schedule}).train.schedule == made


def test_clip_in_short_and_in_full() -> None:
    """A number is the largest norm, taken in fp32."""
    assert Train(steps=1).clipping is None
    assert Train(steps=1, clip=0.5).clipping == Clip(max=0.5, norm="fp32")
    assert Train(steps=1, clip=Clip(max=0.5, norm="fp64")).clipping == Clip(max=0.5, norm="fp64")


@pytest.mark.parametrize(
    ("scale", "total", "factor"),
    [
        (LrScale(), 64, 1.0),
        (LrScale(rule="linear", base_batch_size=16), 64, 4.0),
        (LrScale(rule="sqrt", base_batch_size=16), 64, 2.0),
        (LrScale(rule="linear", base_batch_size=64), 16, 0.25),
    ],
)
def test_the_rate_follows_the_batch(scale: LrScale, total: int, factor: float) -> None:
    """By the ratio of the batches, or by its root."""
    assert scale.factor(total) == factor


def test_a_config_is_frozen() -> None:
    """What was checked is what runs."""
    with pytest.raises(ValidationError, match="frozen"):
        config().train.seed = 1  # type: ignore[misc] - that is the point


def test_a_config_read_back_is_equal() -> None:
    """The ranks read it from JSON, the choices by name included."""
    made = config(
        train={"optimizer": {"name": "sgd"}, "schedule": {"name": "linear"}, "clip": {"max": 1.0}},
        task={"use": "a.b:C", "args": {"x": [1, {"y": None}]}},
        model={"blocks": ["layers.*"]},
    )
    assert Config.model_validate_json(made.model_dump_json()) == made


def test_a_plain_strategy_is_plain_and_a_variant_is_one() -> None:
    """`registry.at` gives the strategy that was asked for, whatever the config's options and backend say."""
    library = config(options={"deepspeed": {"buckets": "library"}})
    plain = config_in_strategy(library, Strategy.parse("deepspeed/gradients"))
    assert strategy_of(plain) == Strategy("deepspeed", "gradients")
    varied = config_in_strategy(config(), Strategy.parse("deepspeed/gradients+library"))
    assert varied.options == {"deepspeed": {"buckets": "library"}}
    assert strategy_of(varied) == Strategy("deepspeed", "gradients", "library")


def test_an_option_that_contradicts_the_strategy() -> None:
    """The option is not overruled in silence."""
    scaled = config(options={"deepspeed": {"buckets": "scaled"}})
    with pytest.raises(ConfigError) as e:
        config_in_strategy(scaled, Strategy.parse("deepspeed/gradients+library"))
    assert str(e.value) == (
        "options.deepspeed.buckets: 'scaled' contradicts the strategy deepspeed/gradients+library, "
        "which sets it to 'library'"
    )


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"total": 32}, BatchSizes(32, 16, 2, 1)),
        ({"total": 32, "micro": 4}, BatchSizes(32, 4, 8, 1)),
        ({"total": None, "micro": 4, "accumulate": 2}, BatchSizes(16, 4, 4, 1)),
    ],
)
def test_one_process_trains_on_the_same_batches(batch: dict[str, Any], sizes: BatchSizes) -> None:
    """Two ranks' microbatches, one after another."""
    one = config_in_strategy(config(batch=batch, parallel={"data": 2}), Strategy("single"))
    assert one.batch.settle(1) == sizes
    assert one.parallel.data == 1


def test_expand() -> None:
    """Stars stand for strategies; each strategy comes once, in the order asked for."""
    strategies = expand_strategy_patterns(("native", "native/*", "deepspeed/gradients+library", "native/nothing"))
    assert list(map(str, strategies)) == [
        "native/nothing",
        "native/optimizer",
        "native/gradients",
        "native/parameters",
        "deepspeed/gradients+library",
    ]
    assert {"single", "horovod/nothing", "deepspeed/gradients+library"} <= set(
        map(str, expand_strategy_patterns(("*",)))
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"backend": "horovod", "parallel": {"shard": "gradients"}},
            "horovod/gradients: parallel.shard: gradients is not available; horovod has nothing",
        ),
        (
            {"train.precision": "bf16-master"},
            "native/nothing: train.precision: bf16-master is not available: DDP, as nn.DataParallel, keeps one copy of "
            "the parameters, so there is no fp32 master beside bf16 ones; use another shard, or deepspeed/*",
        ),
        (
            {"backend": "single", "parallel.data": 2},
            "single: parallel.data: 2 contradicts the strategy: single is one process",
        ),
        (
            {"backend": "horovod", "parallel.shard": "optimizer", "train.precision": "bf16-master"},
            "horovod/optimizer cannot run this config:\n"
            "  - parallel.shard: optimizer is not available; horovod has nothing\n"
            "  - train.precision: bf16-master is not available: Horovod has no bf16 tensors; use bf16-mixed, "
            "native/parameters or deepspeed/*",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    """A strategy that cannot run a config says every reason, with key, value and way out."""
    with pytest.raises(Unsupported) as e:
        checks.check_can_run(config(**changes))
    assert str(e.value) == sentence


@pytest.mark.parametrize("key", ["checkpoint.to", "resume"])
def test_addresses_of_checkpoints(key: str) -> None:
    """They are kept, and one with a password is refused in a sentence that does not repeat it."""
    data: dict[str, Any] = {"batch": {"total": 8}, "train": {"steps": 1}}
    source = load_given_config({**data, **_nested(key, "S3://bucket/path/")})
    config = source.config
    assert (config.checkpoint.to if config.checkpoint else config.resume) == "s3://bucket/path"
    with pytest.raises(ConfigError) as refused:
        load_given_config({**data, **_nested(key, "sftp://me:hunter2@host/path")})
    assert str(refused.value) == (
        f"the config: {key}: sftp://***@host/path holds a password, which would be written to config files and logs: "
        "leave it out, and give it to the store's own library, in its environment variables or its file"
    )


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([5, 4], "log.trace.steps (overrides): the first step (5) is after the last one (4): write [4, 5]"),
        (
            [1, 90],
            "log.trace.steps (overrides): 1 to 90 are 90 steps, and a trace of more than 50 is too large to be opened: "
            "write [1, 3]",
        ),
        ([4], "log.trace.steps (overrides): wanted a list of 2 values, each a whole number above 0, got [4]"),
    ],
)
def test_steps_of_a_trace_that_are_none(steps: list[int], sentence: str) -> None:
    """First and last, in this order, and not too many."""
    with pytest.raises(ConfigError) as e:
        config(**{"log.trace": {"steps": steps}})
    assert str(e.value) == f"the config: {sentence}"


def test_steps_of_a_trace() -> None:
    """Both ends are traced, on rank 0 unless others are named."""
    trace = config(**{"log.trace": {"steps": [10, 12]}}).log.trace
    assert trace is not None
    assert ([*trace.numbers], trace.ranks) == ([10, 11, 12], (0,))
