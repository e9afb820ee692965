"""Each rule by which a draft's config is guessed from what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from unipar.backend.checks import given_source
from unipar.config.safe_yaml import parse_yaml
from unipar.observing.draft_config import DraftConfig, optimizer_name
from unipar.results.observed_rank import ObservedRank, guess_precision
from unipar.results.observed_recipe import Recipe, SeenLoader, SeenObject, SeenOptimizer, SeenSchedule

DATASET = SeenObject(name="Points", module="mine")


def _optimizer(name: str = "AdamW", module: str = "torch.optim.adamw", **settings: Any) -> SeenOptimizer:
    return SeenOptimizer(name=name, module=module, settings={"lr": 1e-3, "weight_decay": 0.01, **settings})


def _text(recipe: dict[str, Any] | None = None, **rank: Any) -> str:
    """Return the config for what was seen."""
    usual: dict[str, Any] = {
        "wrappers": ("DDP",),
        "optimizers": (_optimizer(),),
        "loader": SeenLoader(dataset=DATASET, batch_size=4, shuffle=True),
        "seed": 1,
    }
    seen = Recipe(**{**usual, **(recipe or {})})
    values: dict[str, Any] = {
        "rank": 0,
        "size": 2,
        "launched_size": 2,
        "dtypes": {"float32": 9},
        "steps": 20,
        "first_dimension": 4,
        "backwards": (1,) * 10,
        "rates": dict.fromkeys(range(1, 11), (1e-3,)),
    }
    written = ObservedRank(**{**values, **rank}, recipe=seen).model_dump_json()
    read = ObservedRank.model_validate_json(written)
    assert read.recipe is not None
    return DraftConfig(read, read.recipe).text("task.py:NetTask", "train.py")


def _config(recipe: dict[str, Any] | None = None, **rank: Any) -> dict[str, Any]:
    """Return the config for what was seen, which must pass the checks of names and values."""
    tree, _ = parse_yaml(_text(recipe, **rank))
    given_source(tree)
    return tree


def _line(text: str, key: str) -> str:
    """Return the line of a key, without what lies between value and remark."""
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        ({"wrappers": ()}, ("native", "nothing")),
        ({"wrappers": ("DDP",)}, ("native", "nothing")),
        ({"wrappers": ("Fabric", "DDP")}, ("native", "nothing")),
        ({"wrappers": ("FSDP1",)}, ("native", "parameters")),
        ({"wrappers": ("FSDP2",)}, ("native", "parameters")),
        ({"wrappers": ("DDP",), "backend": "accelerate"}, ("accelerate", "nothing")),
        ({"wrappers": ("FSDP1",), "backend": "accelerate"}, ("accelerate", "parameters")),
        ({"wrappers": (), "backend": "horovod"}, ("horovod", "nothing")),
        (
            {"optimizers": (_optimizer("ZeroRedundancyOptimizer", "torch.distributed.optim"), _optimizer())},
            ("native", "optimizer"),
        ),
    ],
    ids=str,
)
def test_strategy(recipe: dict[str, Any], strategy: tuple[str, str]) -> None:
    """The wrapper says what is split, and the library that trains is the backend."""
    tree = _config(recipe)
    assert (tree["backend"], tree["parallel"]["shard"]) == strategy


@pytest.mark.parametrize(("stage", "shard"), [(1, "optimizer"), (2, "gradients"), (3, "parameters")])
def test_config_of_the_library(stage: int, shard: str) -> None:
    """The library's own config is read as `unipar import` reads it; what was seen counts more."""
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "nonsense": 1,
    }
    tree = _config({"backend": "deepspeed", "wrappers": ("DeepSpeed",), "library_config": config})
    assert (tree["backend"], tree["parallel"]["shard"], tree["batch"]["micro"]) == ("deepspeed", shard, 4)
    assert (tree["train"]["clip"], tree["train"]["precision"]) == (0.5, "bf16-master")
    assert "# left out: nonsense: not known" in _text(
        {"backend": "deepspeed", "wrappers": ("DeepSpeed",), "library_config": config}
    )


def test_optimizer_of_the_library() -> None:
    """An optimizer that only the library has is the one of its config."""
    section = {"type": "AdamW", "params": {"lr": 2e-4, "weight_decay": 0.3}}
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": section, "zero_optimization": {"stage": 1}}
    fused = _optimizer("FusedAdam", "deepspeed.ops.adam")
    tree = _config({"backend": "deepspeed", "optimizers": (fused,), "library_config": config}, rates={})
    assert tree["train"]["optimizer"] | {"name": "adamw", "lr": 2e-4, "weight_decay": 0.3} == tree["train"]["optimizer"]


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        (_optimizer(), "adamw"),
        (_optimizer("Adam", "torch.optim.adam"), "adam"),
        (_optimizer("Adam", "torch.optim.adam", decoupled_weight_decay=True), "adamw"),
        (_optimizer("SGD", "torch.optim.sgd"), "sgd"),
        (_optimizer("RMSprop", "torch.optim.rmsprop"), "rmsprop"),
        (_optimizer("AdamW", "mine"), None),
        (_optimizer("Adafactor", "torch.optim._adafactor"), None),
    ],
    ids=str,
)
def test_optimizer_name(seen: SeenOptimizer, name: str | None) -> None:
    """PyTorch's optimizers have unipar's names; one of the same name from elsewhere has none."""
    assert optimizer_name(seen) == name


def test_settings_of_the_optimizer() -> None:
    """Settings that differ from unipar's defaults are written; what unipar lacks is a to do."""
    sgd = _optimizer("SGD", "torch.optim.sgd", momentum=0.9, nesterov=True, dampening=0, foreach=None)
    assert _config({"optimizers": (sgd,)})["train"]["optimizer"] == {
        "name": "sgd",
        "lr": 1e-3,
        "weight_decay": 0.01,
        "momentum": 0.9,
        "nesterov": True,
    }
    text = _text({"optimizers": (_optimizer(amsgrad=True, betas=[0.9, 0.95]),)})
    assert "# to do: the script's optimizer has amsgrad=true, which unipar lacks\n" in text
    assert "betas: [0.9, 0.95]" in text


@pytest.mark.parametrize(
    ("decay", "line"),
    [
        ("matrices", "decay: matrices"),
        ("transformers", "decay: transformers"),
        ("own", "weight_decay: 0.1 # to do: groups differ: the task's groups() must give each its own"),
    ],
)
def test_groups(decay: str, line: str) -> None:
    """The decay is the largest of the groups', whichever group comes first."""
    split = SeenOptimizer(
        name="AdamW",
        module="torch.optim.adamw",
        settings={"lr": 1e-3, "weight_decay": 0.0},
        groups=({}, {"weight_decay": 0.1}),
        decay=decay,
    )
    text = _text({"optimizers": (split,)})
    assert _line(text, line.partition(":")[0]) == line
    assert "weight_decay: 0.1" in text


def test_two_optimizers() -> None:
    """A script with two optimizers has parts, which only the user can name."""
    assert "# to do: the script has 2 optimizers (AdamW, SGD); this is AdamW: return the parts" in _text(
        {"optimizers": (_optimizer(), _optimizer("SGD", "torch.optim.sgd"))}
    )


@pytest.mark.parametrize(
    ("rank", "micro", "accumulate"),
    [
        ({}, "micro: 4", "accumulate: 1"),
        (
            {"first_dimension": 3},
            "micro: 3 # guess: first dimension of the first tensor in a batch",
            "accumulate: 1",
        ),
        (
            {"first_dimension": None},
            "micro: 1 # to do: samples in one forward pass on a rank; no loader of torch was seen",
            "accumulate: 1",
        ),
        (
            {"backwards": (4,) * 9},
            "micro: 4",
            "accumulate: 4 # guess: backwards in a step; 1 if they are different losses of the same batch",
        ),
        (
            {"backwards": (4, 4, 1)},
            "micro: 4",
            "accumulate: 4 # guess: backwards in a step; the first steps had 1, 4",
        ),
    ],
    ids=str,
)
def test_batch(rank: dict[str, Any], micro: str, accumulate: str) -> None:
    """A microbatch is a batch of the loader, and backwards are microbatches."""
    text = _text(**rank)
    assert (_line(text, "micro"), _line(text, "accumulate")) == (micro, accumulate)


@pytest.mark.parametrize(
    ("recipe", "rank", "precision"),
    [
        ({}, {}, ("fp32", "")),
        ({}, {"dtypes": {"float64": 9}}, ("fp64", "")),
        ({"autocast": "bfloat16"}, {}, ("bf16-mixed", "")),
        ({"autocast": "float16"}, {"device": "cuda"}, ("fp16", "")),
        ({"loss_scaling": True}, {"device": "cuda"}, ("fp16", "")),
        ({"loss_scaling": True}, {}, ("fp32", "to do: fp16 is for CUDA, not for cpu")),
        (
            {},
            {"dtypes": {"bfloat16": 9, "float32": 1}},
            ("bf16-master", "guess: weights in bf16; unipar keeps fp32 weights beside them"),
        ),
        ({}, {"dtypes": {"float16": 9}}, ("fp32", "to do: the script's weights are float16")),
    ],
    ids=str,
)
def test_precision(recipe: dict[str, Any], rank: dict[str, Any], precision: tuple[str, str]) -> None:
    """Autocast, loss scaling and the weights' dtype say the precision."""
    values: dict[str, Any] = {"rank": 0, "size": 1, "dtypes": {"float32": 9}}
    assert guess_precision(ObservedRank(**{**values, **rank}), Recipe(**recipe)) == precision


def test_schedule() -> None:
    """A schedule is a guess that gives the rates that were seen, and says how long the run is."""
    rates = {step: (1e-3 * (1 - (step - 1) / 50),) for step in range(1, 11)}
    seen = SeenSchedule(name="LambdaLR", numbers={"num_training_steps": 50.0}, functions=("_get_linear_schedule",))
    text = _text({"schedules": (seen,)}, rates=rates)
    assert _line(text, "steps") == "steps: 50 # guess: of the schedule; 20 were taken"
    assert "name: linear                                # guess: it gives the 10 rates that were seen\n" in text
    assert "timing: transformers\n" in text


def test_schedule_that_is_not_found() -> None:
    """Rates that no schedule gives are a to do, with what the script's schedule is."""
    rates = {1: (1e-3,), 2: (5e-4,), 3: (9e-4,)}
    text = _text({"schedules": (SeenSchedule(name="CyclicLR", numbers={"step_size_up": 2000.0}),)}, rates=rates)
    why = "no schedule was found that gives the rates; the script's is CyclicLR(step_size_up=2000)"
    assert f"# to do: {why}: write it, or the task's schedule()\n" in text


def test_schedule_that_had_no_effect() -> None:
    """A schedule under which the rate did not change is told."""
    text = _text({"schedules": (SeenSchedule(name="StepLR", numbers={"step_size": 30.0}),)})
    assert "# to do: the rate did not change in 20 steps; the script's is StepLR(step_size=30)\n" in text


def test_only_a_warm_up() -> None:
    """If only a warm-up was seen, what follows is a to do."""
    text = _text(rates={step: (1e-3 * step / 100,) for step in range(1, 11)})
    assert "warmup: 100" in text
    assert "# to do: only the warm-up was seen: say what comes after it; the script sets them itself\n" in text


@pytest.mark.parametrize(
    ("recipe", "rank", "expected"),
    [
        ({"seed": None}, {}, "seed: 0 # guess: the script gave PyTorch no seed before the model was made"),
        ({"seed": 0}, {}, "seed: 0"),
        ({}, {"clip": 0.5}, "clip: 0.5"),
        (
            {"norm_type": float("inf")},
            {"clip": 0.5},
            "clip: 0.5 # to do: the script limits the norm of kind inf; unipar's is 2",
        ),
        ({"recompute": True}, {}, "recompute: blocks # guess: modules that compute activations again"),
        ({"compiled": "model"}, {}, "compile: model"),
        (
            {},
            {"size": 1},
            "data: 1 # to do: as many as you meant; of 2 processes each trained alone",
        ),
        (
            {"mesh": (2, 2)},
            {"size": 4, "launched_size": 4},
            "data: 4 # to do: the script splits weights on a mesh of 2 x 2: write parallel.tensor or shard_over, too",
        ),
        (
            {"loader": SeenLoader(dataset=DATASET, batch_size=4)},
            {},
            "shuffle: true # to do: the script has a sampler of its own",
        ),
        (
            {"loader": SeenLoader(dataset=DATASET, batch_size=4, shuffle=False, drop_last=True)},
            {},
            "last_batch: drop",
        ),
    ],
    ids=str,
)
def test_other_keys(recipe: dict[str, Any], rank: dict[str, Any], expected: str) -> None:
    """Each other key has its value, and its remark if it was not seen."""
    lines = [" ".join(line.split()) for line in _text(recipe, **rank).splitlines()]
    assert expected in lines


def test_clip_that_only_measures() -> None:
    """A limit without an end clips nothing."""
    assert "clip" not in _config(clip=float("inf"))["train"]


def test_frozen_parameters() -> None:
    """Frozen parameters are told."""
    assert "# to do: 1,200 parameters of the script's model are frozen" in _text({"frozen": 1200})
