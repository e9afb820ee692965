"""What is said of a config that is not one: each sentence, literally."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from unipar.backend import registry
from unipar.backend.checks import given_source
from unipar.config import Config
from unipar.config.validation_errors import join_mistakes, list_known_keys, list_mistakes, list_option_mistakes
from unipar.errors import ConfigError
from unipar.utils.text import did_you_mean, show_value

GOOD: dict[str, Any] = {"batch": {"total": 8}, "train": {"steps": 1}}


def said(changes: dict[str, Any], where: dict[str, str] | None = None) -> str:
    """The complaint about GOOD with dotted keys changed; `...` takes a key away."""
    data = copy.deepcopy(GOOD)
    for dotted, value in changes.items():
        *above, last = dotted.split("/")
        into = data
        for step in above:
            into = into.setdefault(step, {})
        if value is ...:
            del into[last]
        else:
            into[last] = value
    with pytest.raises(ValidationError) as e:
        Config.model_validate(data)
    return join_mistakes(list_mistakes(e.value, where))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        # a key that is not there
        ({"trian": {}}, "trian: there is no such key; did you mean 'train'?"),
        ({"steps": 3}, "steps: there is no such key; did you mean 'train.steps'?"),
        ({"lr": 3}, "lr: there is no such key; the learning rate is train.optimizer.lr"),
        (
            {"zebra": 3},
            "zebra: there is no such key; a config has task, backend, device, parallel, batch, model, data, train, "
            "eval, log, checkpoint, resume, launch, machines, options, compare, out",
        ),
        ({"train.steps": 3}, "train.steps: there is no such key; in a file keys are nested: train: {steps: ...}"),
        (
            {"train.optimizer.lr": 3},
            "train.optimizer.lr: there is no such key; in a file keys are nested: train: {optimizer: {lr: ...}}",
        ),
        (
            {"batch/zebra": 3},
            "batch.zebra: there is no such key; batch has total, tokens, max_length, rows, memory_check, micro, "
            "accumulate, memory, headroom",
        ),
        (
            {"train/optimizer": {"momentum": 0.9}},
            "train.optimizer.momentum: there is no such key; it is a key of sgd, rmsprop and muon, and this is adamw",
        ),
        (
            {"train/schedule": {"min_lr_ratio": 0.1}},
            "train.schedule.min_lr_ratio: there is no such key; it is a key of linear, cosine, polynomial, wsd and "
            "one-cycle, and this is constant",
        ),
        ({"train/clip": {"max": 1.0, "nrm": "fp64"}}, "train.clip.nrm: there is no such key; did you mean 'norm'?"),
        # a key that is missing
        (
            {"batch": ...},
            "batch is missing; wanted a section with the keys total, tokens, max_length, rows, memory_check, micro, "
            "accumulate, memory, headroom",
        ),
        (
            {"task": {}},
            "task: use is missing: write file.py:Class, or give args for the class that a script passes",
        ),
        ({"train/clip": {"norm": "fp64"}}, "train.clip.max is missing; wanted a number above 0"),
        ({"train/steps": ...}, "train: give one of steps and epochs, not both"),
        ({"batch/total": ...}, "batch: two of total, micro and accumulate are needed (or total alone); given: none"),
        (
            {"batch": {"micro": 4}},
            "batch: two of total, micro and accumulate are needed (or total alone); given: micro: 4",
        ),
        (
            {"train/lr_scale": {"rule": "linear"}},
            "train.lr_scale: rule and base_batch_size go together: {rule: linear, base_batch_size: 32}, or neither",
        ),
        # a value of the wrong kind
        (
            {"batch": 8},
            "batch: wanted a section with the keys total, tokens, max_length, rows, memory_check, micro, "
            "accumulate, memory, headroom, got 8",
        ),
        (
            {"model": None},
            "model: wanted a section with the keys weights, blocks, recompute, compile, sync_batchnorm, offload, "
            "got null",
        ),
        ({"batch/total": True}, "batch.total: wanted a whole number above 0 or null, got true"),
        ({"batch/total": 8.5}, "batch.total: wanted a whole number above 0 or null, got 8.5"),
        ({"batch/total": "8"}, "batch.total: wanted a whole number above 0 or null, got '8'"),
        ({"data": {"shuffle": "yes"}}, "data.shuffle: wanted true or false, got 'yes'"),
        ({"data": {"workers": -1}}, "data.workers: wanted a whole number of at least 0, got -1"),
        ({"out": 3}, "out: wanted text or null, got 3"),
        ({"log": {"every": 0}}, "log.every: wanted a whole number above 0, got 0"),
        (
            {"train/seed": 2**32},
            "train.seed: wanted a whole number of at least 0 and below 4,294,967,296, got 4294967296",
        ),
        (
            {"train/optimizer": {"lr": float("inf")}},
            "train.optimizer.lr: wanted a number above 0, got Infinity",
        ),
        (
            {"train/optimizer": {"fused": "yes"}},
            "train.optimizer.fused: wanted true, false or auto, got 'yes'",
        ),
        (
            {"train/optimizer": {"betas": [0.9]}},
            "train.optimizer.betas: wanted a list of 2 values, each a number of at least 0 and below 1, got [0.9]",
        ),
        (
            {"train/optimizer": {"betas": [0.9, "x"]}},
            "train.optimizer.betas.1: wanted a number of at least 0 and below 1, got 'x'",
        ),
        (
            {"train/optimizer": {"name": "adam", "betas": [0.9, 1]}},
            "train.optimizer.betas.1: wanted a number of at least 0 and below 1, got 1",
        ),
        (
            {"launch": {"timeout": 2592001}},
            "launch.timeout: wanted a number above 0 and of at most 2,592,000, got 2592001",
        ),
        (
            {"launch": {"shutdown_timeout": 1e300}},
            "launch.shutdown_timeout: wanted a number above 0 and of at most 2,592,000, got 1e+300",
        ),
        (
            {"launch": {"heartbeat": 1e9, "timeout": 2e6}},
            "launch.heartbeat: wanted a number above 0 and of at most 2,592,000 or null, got 1000000000.0",
        ),
        # values that do not go together
        (
            {"train/optimizer": {"name": "sgd", "nesterov": True}},
            "train.optimizer: nesterov: true needs a momentum, which is 0; give one (momentum: 0.9)",
        ),
        (
            {"train/optimizer": {"name": "muon", "momentum": 0}},
            "train.optimizer: nesterov: true needs a momentum, which is 0; leave momentum out (0.95)",
        ),
        (
            {"train/optimizer": {"name": "muon", "lr": 0.02, "adjust_lr": "original"}},
            "train.optimizer: adjust_lr: original needs a rate of its own for AdamW, for which Muon's (0.02) is too "
            "high: say adamw: {lr: 3e-4}, or leave adjust_lr out",
        ),
        (
            {"train/optimizer": {"fused": True, "foreach": True}},
            "train.optimizer: fused: true and foreach: true exclude each other; leave one of them out",
        ),
        (
            {"train": {"steps": 19, "schedule": {"name": "cosine", "warmup": 20}}},
            "train: schedule.warmup (20) is more than steps (19), so the rate would never reach its full value; "
            "give a shorter warmup (train.schedule.warmup: 0), or more steps",
        ),
        ({"train/clip": -1}, "train.clip: wanted a number above 0, {max: ..., norm: ...} or null, got -1"),
        ({"train/clip": {"max": 0}}, "train.clip.max: wanted a number above 0, got 0"),
        ({"model": {"blocks": 3}}, "model.blocks: wanted auto, none or a list, each text, got 3"),
        ({"model": {"blocks": ["a", 3]}}, "model.blocks.1: wanted text, got 3"),
        (
            {"compare": {"strategies": []}},
            "compare.strategies: wanted a list with at least one entry, each text, got []",
        ),
        ({"options": {"native": 3}}, "options.native: wanted a section, got 3"),
        # a word that is none of the choices
        (
            {"parallel": {"shard": "parameter"}},
            "parallel.shard: wanted nothing, optimizer, gradients or parameters, got 'parameter'; "
            "did you mean 'parameters'?",
        ),
        ({"parallel": {"data": "all"}}, "parallel.data: wanted a whole number above 0 or auto, got 'all'"),
        (
            {"train/precision": "bf16"},
            "train.precision: wanted fp32, fp64, fp16, bf16-mixed, bf16-master, fp8 or fp8-rowwise, got 'bf16'; "
            "write bf16-mixed (fp32 parameters, bf16 compute)",
        ),
        (
            {"data": {"last_batch": "kepe"}},
            "data.last_batch: wanted keep, drop or error, got 'kepe'; did you mean 'keep'?",
        ),
        (
            {"device": "gpu"},
            "device: wanted auto, cpu, cuda, xpu, npu, hpu, mps, or one device such as cuda:0, "
            "which several ranks may share, got 'gpu'; write cuda",
        ),
        ({"log": {"to": [1]}}, "log.to.0: wanted text, got 1"),
        (
            {"train/optimizer": {"name": "adamm"}},
            "train.optimizer.name: wanted sgd, adam, adamw, rmsprop, adamw-bf16, adamw-8bit or muon, got 'adamm'; did "
            "you mean 'adam'?",
        ),
        (
            {"train/optimizer": {"name": None}},
            "train.optimizer.name: wanted sgd, adam, adamw, rmsprop, adamw-bf16, adamw-8bit or muon, got null",
        ),
        (
            {"train/schedule": "cosine"},
            "train.schedule: wanted a section {name: ..., ...} whose name is constant, linear, cosine, polynomial, "
            "inverse-root, step, wsd or one-cycle, got 'cosine'; write {name: cosine}",
        ),
        (
            {"train/optimizer": 3},
            "train.optimizer: wanted a section {name: ..., ...} whose name is sgd, adam, adamw, rmsprop, adamw-bf16, "
            "adamw-8bit or muon, got 3",
        ),
        (
            {"launch": {"heartbeat": 60, "timeout": 30}},
            "launch: timeout (30) must be larger than heartbeat (60), "
            "otherwise the ranks that wait would be blamed before the one that hangs",
        ),
    ],
)
def test_one_mistake_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    """The key, what is wanted, what was given, and what may have been meant."""
    assert said(changes) == sentence


def test_several_mistakes_are_a_list() -> None:
    """All of them at once, so that nobody mends them one by one."""
    assert said({"trian": {}, "batch/total": 0, "train/clip": "a"}) == (
        "3 mistakes:\n"
        "  - batch.total: wanted a whole number above 0 or null, got 0\n"
        "  - train.clip: wanted a number above 0, {max: ..., norm: ...} or null, got 'a'\n"
        "  - trian: there is no such key; did you mean 'train'?"
    )


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ({"batch": "line 2", "batch.total": "line 3"}, "batch.total (line 3)"),
        ({"batch": "line 2"}, "batch.total (line 2)"),
        ({"batch.total": "--set"}, "batch.total (--set)"),
        ({"train": "line 2"}, "batch.total"),
    ],
)
def test_the_place_is_named(where: dict[str, str], place: str) -> None:
    """The key's own line, else that of the section it stands in."""
    assert said({"batch/total": 0}, where) == f"{place}: wanted a whole number above 0 or null, got 0"


def sections(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every section in a Config that has but its defaults."""
    yield above
    for name in model.model_fields:
        value = getattr(FULL, name) if not above else getattr(at(above), name)
        if isinstance(value, BaseModel):
            yield from sections(type(value), (*above, name))


def at(path: tuple[str, ...]) -> Any:
    value: Any = FULL
    for step in path:
        value = getattr(value, step)
    return value


FULL = Config.model_validate({**GOOD, "task": {"use": "a.py:B"}, "train": {"steps": 1, "clip": {"max": 1.0}}})
KEYS = [(path, key) for path in sections(Config) for key in type(at(path)).model_fields]


@pytest.mark.parametrize(("path", "key"), KEYS, ids=lambda x: x if isinstance(x, str) else "/".join(x))
def test_a_typo_in_any_key_at_every_depth(path: tuple[str, ...], key: str) -> None:
    """Two letters changed places, or one was doubled: the right key is proposed."""
    typo = key + key[-1]
    value = {"task": {"use": "a.py:B"}} if path[:1] == ("task",) else {}
    if path[:2] == ("train", "clip"):
        value = {"train": {"clip": {"max": 1.0}, "steps": 1}}
    data = {**copy.deepcopy(GOOD), **value}
    into: Any = data
    for step in path:
        into = into.setdefault(step, {})
    into[typo] = 1
    with pytest.raises(ValidationError) as e:
        Config.model_validate(data)
    dotted = ".".join((*path, typo))
    assert list_mistakes(e.value) == [f"{dotted}: there is no such key; did you mean {key!r}?"]


def test_known_keys_reach_every_depth() -> None:
    """The keys of all sections that could stand in one place are known."""
    keys = set(list_known_keys(Config))
    assert {"batch", "train.optimizer.momentum", "train.optimizer.betas", "train.clip.norm", "out"} <= keys


@pytest.mark.parametrize(
    ("backend", "given", "sentence"),
    [
        ("deepspeed", {"bucket": "library"}, "options.deepspeed.bucket: there is no such key; did you mean 'buckets'?"),
        (
            "deepspeed",
            {"buckets": "scald"},
            "options.deepspeed.buckets: wanted scaled or library, got 'scald'; did you mean 'scaled'?",
        ),
        (
            "horovod",
            {"fusion_mb": -1},
            "options.horovod.fusion_mb: wanted a whole number of at least 0 or null, got -1",
        ),
        ("native", {"bucket_cap_mb": 0}, "options.native.bucket_cap_mb: wanted a whole number above 0, got 0"),
        ("single", {"x": 1}, "options.single.x: there is no such key; options.single has none"),
    ],
)
def test_options(backend: str, given: dict[str, Any], sentence: str) -> None:
    """A backend's own keys are spelled as in the file."""
    found = registry.find_backend(backend)
    with pytest.raises(ValidationError) as e:
        found.options.model_validate(given)
    assert list_option_mistakes(e.value, found.options, f"options.{backend}") == [sentence]


def test_options_of_a_backend_that_is_not_used() -> None:
    """A typo waits for no one to choose that backend."""
    with pytest.raises(ConfigError) as e:
        given_source({**GOOD, "options": {"horovod": {"fusion": 3}}})
    assert str(e.value) == "the config: options.horovod.fusion: there is no such key; did you mean 'fusion_mb'?"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (True, "true"),
        (None, "null"),
        ([1, "b"], '[1, "b"]'),
        ({1}, "{1}"),
        ("x" * 99, "'" + "x" * 55 + " ..."),
    ],
)
def test_values_are_shown_as_a_config_says_them(value: object, text: str) -> None:
    """Short, and in the words of the file."""
    assert show_value(value) == text


@pytest.mark.parametrize(
    ("word", "question"),
    [("totl", "; did you mean 'total'?"), ("mic", "; did you mean 'micro'?"), ("zebra", ""), ("", "")],
)
def test_near(word: str, question: str) -> None:
    """A beginning, or a slip of the fingers; otherwise nothing is proposed."""
    assert did_you_mean(word, ["total", "micro", "accumulate"]) == question
