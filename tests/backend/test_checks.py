"""Every explicit setting is obeyed, or refused with both places named: --backend, --set, the file, the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unipar.backend import Backend
from unipar.backend.checks import (
    CheckedSource,
    check_run_settings,
    check_strategy,
    in_strategy,
    read_source,
    refuse_absent_ranks,
)
from unipar.backend.offered_strategies import config_in_strategy
from unipar.backend.registry import find_backend
from unipar.config import Config, Strategy
from unipar.errors import ConfigError, UniparError

FILE = """\
device: cpu
batch: {total: 32, micro: 8}
train: {steps: 10}
parallel: {data: 2}
"""


def chosen(tmp_path: Path, words: str, file: str = FILE) -> CheckedSource:
    """Return the config of a command line such as `--backend native --set train.steps=3`, once it is checked."""
    (tmp_path / "x.yaml").write_text(file, "utf-8")
    flags = [*zip(words.split()[::2], words.split()[1::2], strict=True)]
    source = read_source(tmp_path / "x.yaml", [value for flag, value in flags if flag == "--set"])
    for value in (value for flag, value in flags if flag == "--backend"):
        source = in_strategy(source, value)
    check_strategy(source.config, source.backend, source.strategy, source.places)
    return source


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--backend native/nothing --set parallel.shard=parameters",
         "--backend native/nothing sets parallel.shard: nothing, and --set sets parallel.shard: parameters; leave one "
         "of them out"),
        ("--backend native/nothing --set parallel.shard_over=2",
         "native/nothing (--backend): parallel.shard_over (--set): 2 is not available here, only in native/optimizer, "
         "native/gradients, native/parameters"),
        ("--backend horovod --set parallel.shard=optimizer",
         "horovod/optimizer (--backend and --set): parallel.shard (--set): optimizer is not available; horovod has "
         "nothing"),
        ("--backend native/parameters --set backend=deepspeed",
         "--backend native/parameters sets backend: native, and --set sets backend: deepspeed; leave one of them out"),
        ("--backend native/nothing+tensor2 --set parallel.tensor=4",
         "--backend native/nothing+tensor2 sets parallel.tensor: 2, and --set sets parallel.tensor: 4; leave one of "
         "them out"),
        ("--backend single --set parallel.shard=parameters",
         "--backend single sets parallel.shard: nothing, and --set sets parallel.shard: parameters; leave one of them "
         "out"),
        ("--backend single --set parallel.tensor=2",
         "--backend single sets parallel.tensor: 1, and --set sets parallel.tensor: 2; leave one of them out"),
        ("--backend single --set train.local_steps=2",
         "single (--backend): train.local_steps (--set): 2 is not available here, only in native/nothing"),
        ("--backend deepspeed/gradients+library --set options.deepspeed.buckets=scaled",
         "--backend deepspeed/gradients+library sets options.deepspeed.buckets: library, and --set sets "
         "options.deepspeed.buckets: scaled; leave one of them out"),
        ("--backend accelerate --set options.accelerate.through=deepspeed",
         "accelerate/nothing (--backend): options.accelerate.through (--set): deepspeed has no effect, as nothing is "
         "split; leave it out"),
        ("--backend native/parameters --set options.native.bucket_cap_mb=3",
         "native/parameters (--backend): options.native.bucket_cap_mb (--set): 3 has no effect: it is DDP's, which "
         "this strategy does not use; leave it out"),
        ("--set parallel.shard=parameters --set options.native.find_unused_parameters=true",
         "native/parameters (--set): options.native.find_unused_parameters (--set): true has no effect: it is DDP's, "
         "which this strategy does not use; leave it out"),
        ("--backend accelerate/parameters --set options.accelerate.find_unused_parameters=true",
         "accelerate/parameters (--backend): options.accelerate.find_unused_parameters (--set): true has no effect: it "
         "is DDP's, which this strategy does not use; leave it out"),
        ("--backend accelerate/gradients --set options.deepspeed.reduce=5",
         "accelerate/gradients (--backend): options.deepspeed.reduce (--set): 5 has no effect: Accelerate shards with "
         "FSDP2 (options.accelerate.through: auto); leave it out"),
        ("--set options.native.powersgd_rank=2",
         "native/nothing: options.native.powersgd_rank (--set): 2 has no effect: hook is not powersgd; leave it out"),
        ("--set options.native.vocabulary=split",
         "native/nothing: options.native.vocabulary (--set): split has no effect: parallel.tensor is 1; leave it out"),
        ("--set options.native.attention=ring",
         "native/nothing: options.native.attention (--set): ring has no effect: parallel.context is 1; leave it out"),
        ("--set options.native.proof=off",
         "native/nothing: options.native.proof (--set): off has no effect: nothing is split over tensor, pipeline, "
         "context or expert; leave it out"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(tmp_path: Path, words: str, sentence: str) -> None:
    """The sentence names the flag and the key, with the place of each."""
    with pytest.raises(UniparError) as refused:
        chosen(tmp_path, words)
    assert str(refused.value) == sentence


def test_a_key_of_the_file_has_its_line(tmp_path: Path) -> None:
    """A key that --backend does not name stays as in the file, and is refused with its line."""
    file = FILE.replace("{data: 2}", "{data: 1, tensor: 2}")
    with pytest.raises(UniparError) as refused:
        chosen(tmp_path, "--backend horovod", file)
    assert str(refused.value) == (
        "horovod/nothing+tensor2 (--backend): parallel.tensor (line 4): 2 is not available here, only in "
        "accelerate/nothing, accelerate/gradients, accelerate/parameters, deepspeed/nothing, deepspeed/optimizer, "
        "deepspeed/gradients, deepspeed/parameters, native/nothing, native/optimizer, native/gradients, "
        "native/parameters: Horovod sums tensors over ranks and has no part that splits a model"
    )


@pytest.mark.parametrize(
    ("words", "parallel", "strategy", "data"),
    [
        ("--backend native/nothing --set parallel.tensor=2", "{data: 2}", "native/nothing+tensor2", 2),
        ("--backend native/nothing --set parallel.pipeline=2", "{data: 2}", "native/nothing+pipeline2", 2),
        ("--backend native/nothing --set parallel.context=2", "{data: 2}", "native/nothing+context2", 2),
        ("--backend native/parameters", "{data: 1, tensor: 2}", "native/parameters+tensor2", 1),
        ("--backend native/parameters+tensor2", "{data: 2}", "native/parameters+tensor2", 1),
        ("--backend native/parameters+tensor2 --set parallel.data=2", "{data: 4}", "native/parameters+tensor2", 2),
        ("--backend deepspeed", "{data: 2, shard: parameters}", "deepspeed/parameters", 2),
        ("--set backend=deepspeed", "{data: 2, shard: parameters}", "deepspeed/parameters", 2),
        ("--backend single", "{data: 2, shard: parameters}", "single", 1),
        ("--backend native/parameters --set parallel.shard_over=2", "{data: 4}", "native/parameters", 4),
    ],
)
def test_settings_are_obeyed(tmp_path: Path, words: str, parallel: str, strategy: str, data: int) -> None:
    """--backend changes the keys that it names, and the number of ranks stays unless parallel.data is set."""
    source = chosen(tmp_path, words, FILE.replace("{data: 2}", parallel))
    assert str(source.strategy) == strategy
    assert source.config.parallel.data == data
    assert source.config.batch.total == 32


def test_an_option_of_another_strategy_is_left_out_of_a_list(tmp_path: Path) -> None:
    """compare and verify move a config to strategies of several kinds, each of which has the options that it uses."""
    file = FILE + "options: {native: {find_unused_parameters: true}, deepspeed: {buckets: library}}\n"
    config = chosen(tmp_path, "", file).config
    assert config_in_strategy(config, Strategy.parse("native/nothing")).options["native"] == {
        "find_unused_parameters": True
    }
    assert config_in_strategy(config, Strategy.parse("native/parameters")).options["native"] == {}
    assert config_in_strategy(config, Strategy.parse("accelerate/parameters")).options["deepspeed"] == {}


@pytest.mark.parametrize(
    ("backend", "variables", "sentence"),
    [
        ("native", {"ACCELERATE_MIXED_PRECISION": "bf16"},
         "accelerate launch was told mixed_precision: bf16, and the config says train.precision: fp32, which is no "
         "there; change one of them"),
        ("deepspeed", {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true"},
         "accelerate launch was told distributed_type: FSDP, and the config says parallel.shard: nothing, which is not "
         "FSDP; change one of them"),
        ("native", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
         "Accelerate's variables here say distributed_type: DEEPSPEED, and the config says parallel.shard: nothing, "
         "which is not DeepSpeed; change one of them"),
        ("native", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
         "Accelerate's variables here say gradient_accumulation_steps: 4, and the config says batch: 2 microbatches a "
         "step, which is gradient_accumulation_steps: 2; change one of them"),
        ("horovod --set options.horovod.fusion_mb=4", {"HOROVOD_FUSION_THRESHOLD": "9437184"},
         "horovodrun was told --fusion-threshold-mb 9, and the config says options.horovod.fusion_mb: 4; leave one of "
         "them out"),
        ("horovod --set options.horovod.cycle_ms=4.0", {"HOROVOD_CYCLE_TIME": "9"},
         "horovodrun was told --cycle-time-ms 9, and the config says options.horovod.cycle_ms: 4; leave one of them "
         "out"),
    ],
)  # fmt: skip
def test_launchers_are_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, variables: dict[str, str], sentence: str
) -> None:
    """A launcher's flags contradict the config whichever backend trains it, and without that launcher, too."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UniparError) as refused:
        chosen(tmp_path, f"--set backend={backend}")
    assert str(refused.value).partition(": ")[2] == sentence


@pytest.mark.parametrize("words", [["--gradient_accumulation_steps", "4"], ["--gradient-accumulation-steps=4"]])
def test_accumulation_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """accelerate launch sets no variable for it then, so the words of the command itself are read."""
    command = [sys.executable, "-c", "print(flush=True); input()", *words]
    launch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launch.stdout is not None
    launch.stdout.readline()
    try:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        monkeypatch.setattr(os, "getppid", lambda: launch.pid)
        with pytest.raises(UniparError) as refused:
            chosen(tmp_path, "")
    finally:
        launch.communicate(b"\n")
    assert str(refused.value) == (
        "native/nothing: accelerate launch was told gradient_accumulation_steps: 4, and the config says batch: 2 "
        "microbatches a step, which is gradient_accumulation_steps: 2; change one of them"
    )


def test_horovodruns_buffer_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--fusion-threshold-mb 9 is the size that Horovod gets, if the config says none."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "9437184")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2.5")
    settings = find_backend("horovod").native_config(chosen(tmp_path, "--set backend=horovod").config, 1000)
    assert (settings["HOROVOD_FUSION_THRESHOLD"], settings["HOROVOD_CYCLE_TIME"]) == (9_437_184, 2.5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--set eval.every=20",
         "eval.every (--set): 20 is beyond the last step, train.steps (line 3): 10; lower it, or leave it out"),
        ("--set train.ema.every=20",
         "train.ema.every (--set): 20 is beyond the last step, train.steps (line 3): 10; lower it, or leave it out"),
        ("--set train.consistency_check.every=20",
         "train.consistency_check.every (--set): 20 is beyond the last step, train.steps (line 3): 10; lower it, "
         "or leave it out"),
        ("--set log.trace={steps:[9,11]}",
         "log.trace.steps (--set): [9, 11] ends beyond the last step, train.steps (line 3): 10; choose steps from 1 to "
         "10, or leave log.trace out"),
        ("--set batch.memory=1GiB",
         "batch.memory (--set) limits the search of batch.micro: auto, and a run with a microbatch of its own has no "
         "limit; leave it out, or set batch.micro: auto"),
        ("--set batch.headroom=10%",
         "batch.headroom (--set) limits the search of batch.micro: auto, and a run with a microbatch of its own has no "
         "limit; leave it out, or set batch.micro: auto"),
        ("--set options.deepspeed.reduce=4",
         "options.deepspeed.reduce (--set) has no effect: native/nothing uses options.native; leave it out"),
        ("--set launch.restarts=2", "launch.restarts (--set): 2 has no effect under torchrun, which starts the ranks: "
         "use its own restarts"),
    ],
)  # fmt: skip
def test_settings_without_effect_in_a_run(tmp_path: Path, words: str, sentence: str) -> None:
    """A run refuses keys that are set and change nothing, with their places."""
    with pytest.raises(ConfigError) as refused:
        check_run_settings(chosen(tmp_path, words), "torchrun")
    assert str(refused.value) == f"{tmp_path / 'x.yaml'}: {sentence}"


@pytest.mark.parametrize(("ranks", "have"), [(1, "one rank, 0"), (2, "2 ranks, 0 to 1")])
def test_a_rank_that_does_not_exist_is_not_traced(tmp_path: Path, ranks: int, have: str) -> None:
    """The number of ranks is known when they are settled."""
    source = chosen(tmp_path, "--set log.trace={steps:[1,2],ranks:[0,2]}")
    with pytest.raises(ConfigError) as refused:
        refuse_absent_ranks(source, ranks)
    assert str(refused.value) == f"log.trace.ranks (--set): there is no rank 2, the run has {have}; leave it out"
    refuse_absent_ranks(source, 3)


def test_settings_with_effect_in_a_run(tmp_path: Path) -> None:
    """Defaults, and options of other backends in a file, which --backend may use, are no contradiction."""
    file = FILE + "options: {deepspeed: {reduce: 4}}\nlaunch: {restarts: 2}\n"
    check_run_settings(chosen(tmp_path, "--set train.consistency_check={} --set eval.every=10", file))


def test_a_launcher_is_asked_if_it_has_said_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's refusals of a launch are read from its variables, by their first letters."""
    asked: list[str] = []

    def note(backend: Backend, config: Config) -> list[str]:
        asked.append(backend.name)
        return []

    for name in ("accelerate", "horovod"):
        monkeypatch.setattr(type(find_backend(name)), "launch_refusals", note)
    for variable in [name for name in os.environ if name.startswith(("ACCELERATE_", "HOROVOD_"))]:
        monkeypatch.delenv(variable)
    chosen(tmp_path, "")
    assert asked == []
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    chosen(tmp_path, "")
    assert asked == ["horovod"]
