"""Arguments of a Trainer beside a library's config: what they fill, and what is assumed without them."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.imports import ADAMW, LEAST, STEPS, YAML, ds, recipe, said, yaml
from unipar.cli.commands.convert import import_
from unipar.conversion.argument_names import TRAINER_DEFAULTS
from unipar.errors import ConfigError

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": 2},
}


def test_the_defaults_of_the_trainer() -> None:
    """They are those of the installed transformers."""
    package = find_spec("transformers")  # read as text: importing it takes seconds
    assert package is not None
    assert package.origin is not None
    tree = ast.parse(Path(package.origin).with_name("training_args.py").read_text("utf-8"))
    theirs: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            for given in node.value.keywords:
                if (
                    given.arg == "default"
                    and node.target.id in TRAINER_DEFAULTS
                    and isinstance(given.value, ast.Constant)
                ):
                    theirs[node.target.id] = given.value.value
    assert theirs == {name: value for name, value in TRAINER_DEFAULTS.items() if name != "optim"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is assumed is told on the terminal, beside the file or on stderr; under --strict nothing is."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(LEAST), encoding="utf-8")
    import_(file, out=tmp_path / "train.yaml")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"written: {tmp_path}/train.yaml, and {tmp_path}/unipar.schema.json for editors"
    assert "assumed: train.epochs: 3" in said
    assert (tmp_path / "unipar.schema.json").is_file()
    import_(file)
    told = capsys.readouterr()
    assert "assumed: train.epochs: 3" in told.err.splitlines()
    assert "assumed: train.epochs: 3" not in told.out.splitlines()
    with pytest.raises(ConfigError, match="how long to train, which the file does not say: give it with --set"):
        import_(file, strict=True)


def test_everything_assumed(tmp_path: Path) -> None:
    """Each "auto" gets the Trainer's default, with a comment in the file, and is told."""
    made = ds(tmp_path, AUTO, strict=False)
    assert said(made) == {
        "backend": "deepspeed",
        "parallel": {"shard": "gradients"},
        "batch": {"micro": 8, "accumulate": 1},
        "train": {
            "clip": 1.0,
            "optimizer": {"name": "adamw", "lr": 5e-5, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8},
            "schedule": {"name": "linear", "warmup": 0},
            "epochs": 3,
            "precision": "fp32",
            "seed": 42,
        },
    }
    assert (
        "    lr: 5e-05                                   # assumed: learning_rate is 5e-05 by default in the Trainer"
        in made.text.splitlines()
    )
    assert "# assumed: adam_beta1 and adam_beta2 are [0.9, 0.999] by default in the Trainer\n" in made.text
    assert "train.optimizer.lr: 5e-05" in made.assumed
    assert "train.precision: 'fp32'" in made.assumed


@pytest.mark.parametrize("library", ["deepspeed", "accelerate", "trainer"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "train.optimizer.weight_decay=0.1",
            {"name": "adamw", "lr": 5e-5, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8},
        ),
        ("train.optimizer.name=sgd", {"name": "sgd", "lr": 5e-5, "weight_decay": 0.0}),
    ],
)
def test_one_key_of_the_optimizer_leaves_the_others(
    tmp_path: Path, library: str, given: str, expected: dict[str, Any]
) -> None:
    """Other keys of the optimizer are assumed as without `--set`, and so is the clip."""
    if library == "deepspeed":
        made = ds(tmp_path, {key: AUTO[key] for key in AUTO if key != "optimizer"}, given, strict=False)
    elif library == "accelerate":
        made = yaml(tmp_path, YAML, given, strict=False)
    else:
        made = recipe(
            tmp_path,
            {"per_device_train_batch_size": 2, "num_train_epochs": 1, "output_dir": "out", "bf16": True},
            given,
        )
    train = said(made)["train"]
    rule = {"decay": "transformers"} if library == "trainer" and expected["weight_decay"] else {}
    assert (train["optimizer"], train["clip"]) == (expected | rule, 1.0)
    told = {line.partition(":")[0] for line in made.assumed if line.startswith(("train.optimizer", "train.clip"))}
    filled = {f"train.optimizer.{key}" for key in expected if f"{key}=" not in given} | {"train.clip"}
    assert told == (set() if library == "trainer" else filled)  # a trainer's file means the Trainer's defaults


def test_no_clip_where_the_file_has_none(tmp_path: Path) -> None:
    """DeepSpeed's section of an accelerate.yaml that does not clip: neither does DeepSpeed under the Trainer then."""
    text = YAML.replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config: {zero_stage: 2}\n"
    for given in ((), ("train.optimizer.lr=0.1",)):
        train = said(yaml(tmp_path, text, *given, strict=False))["train"]
        assert (train["optimizer"]["name"], train.get("clip")) == ("adamw", None)


def test_an_optimizer_given_as_a_whole(tmp_path: Path) -> None:
    """The optimizer stays as it is given; under --strict one key of it answers the question."""
    made = yaml(tmp_path, YAML, "train.optimizer={name: sgd, lr: 0.1}", strict=False)
    assert said(made)["train"]["optimizer"] == {"name": "sgd", "lr": 0.1}
    assert "clip" not in said(made)["train"]
    made = yaml(tmp_path, YAML, "batch.total=32", "train.optimizer.lr=0.1", STEPS)
    assert said(made)["train"]["optimizer"] == {"lr": 0.1}


@pytest.mark.parametrize("form", ["json", "yaml", "line"])
def test_arguments_given(form: str, tmp_path: Path) -> None:
    """A file of either kind, or a command line, fills the same keys."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 2e-5,
        "max_steps": 200,
        "warmup_ratio": 0.1,
        "bf16": True,
        "output_dir": "out",
    }
    args = str(tmp_path / f"args.{form}")
    if form == "line":
        args = " ".join(f"--{name} {value}" for name, value in given.items() if name != "bf16") + " --bf16"
    else:
        Path(args).write_text(json.dumps(given), encoding="utf-8")
    made = ds(tmp_path, AUTO, strict=False, args=args)
    result = said(made)
    assert result["batch"] == {"micro": 2, "accumulate": 4}
    assert (result["train"]["steps"], result["train"]["precision"]) == (200, "bf16-master")
    assert result["train"]["optimizer"]["lr"] == 2e-5
    assert result["train"]["schedule"] == {"name": "linear", "warmup": 20}
    source = "--args" if form == "line" else f"args.{form}"
    assert f"{source}: output_dir: say out" in made.left_out
    assert not any(key.startswith(("batch.", "train.optimizer.lr", "train.steps")) for key in made.assumed)


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ({"lr_scheduler_type": "polynomial"}, {"name": "polynomial", "warmup": 5, "power": 1.0, "min_lr_ratio": 0.001}),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3, "lr_end": 2e-5}},
            {"name": "polynomial", "warmup": 5, "power": 3.0, "min_lr_ratio": 0.2},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-5}'},
            {"name": "cosine", "warmup": 5, "min_lr_ratio": 0.1},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.3}},
            {"name": "cosine", "warmup": 5, "min_lr_ratio": 0.3},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.05},
            },
            {"name": "wsd", "warmup": 5, "decay": 20, "shape": "sqrt", "min_lr_ratio": 0.05},
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 20}},
            {"name": "wsd", "warmup": 5, "decay": 20, "shape": "cosine", "min_lr_ratio": 0.0},
        ),
    ],
)
def test_schedules_with_details(given: dict[str, Any], schedule: dict[str, Any], tmp_path: Path) -> None:
    """Their own numbers, or the defaults of transformers; a rate at the end becomes a share of the full one."""
    file = tmp_path / "args.json"
    arguments = {"learning_rate": 1e-4, "max_steps": 100, "warmup_steps": 5, **given}
    file.write_text(json.dumps(arguments), encoding="utf-8")
    made = yaml(tmp_path, YAML, strict=False, args=str(file))
    assert said(made)["train"]["schedule"] == pytest.approx(schedule | {"timing": "transformers"})


def test_of_an_accelerate_yaml(tmp_path: Path) -> None:
    """What its script would say is assumed; --world takes precedence over the file, with a remark."""
    made = yaml(tmp_path, YAML, strict=False, world=4)
    result = said(made)
    assert (result["parallel"], result["batch"]) == ({"data": 4}, {"micro": 8, "accumulate": 1})
    assert (result["train"]["clip"], result["train"]["epochs"]) == (1.0, 3)
    assert "num_processes: 2, but --world says 4" in made.left_out


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (
            "--learning_rate 1e-5",
            "train.optimizer.lr: the file says 0.0003, --args: learning_rate is 1e-05; choose "
            "with --set train.optimizer.lr=...",
        ),
        ("--learning_rate fast", "--args: learning_rate: 'fast' is not a number; give one"),
        ("--per_device_train_batch_size 0", "--args: per_device_train_batch_size: 0.0 is not a whole number above 0"),
        ("--optim lion_8bit", "--args: optim: lion_8bit is neither sgd nor rmsprop nor a kind of adamw"),
        ("--lr_scheduler_type greedy", "--args: lr_scheduler_type: greedy is not among linear, cosine"),
        (
            "--lr_scheduler_type cosine_with_min_lr",
            "--args: lr_scheduler_kwargs: cosine_with_min_lr needs min_lr or min_lr_rate; give one",
        ),
        (
            "--lr_scheduler_type warmup_stable_decay",
            "--args: lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps, and a decay_type among linear, "
            "cosine, 1-sqrt; give them",
        ),
        (
            """--lr_scheduler_type cosine --lr_scheduler_kwargs '{"num_cycles": 2}'""",
            "--args: lr_scheduler_kwargs: num_cycles: 2 has no key of unipar for cosine; take it out",
        ),
        (
            "--lr_scheduler_kwargs power=2",
            """--args: lr_scheduler_kwargs: 'power=2' is no mapping; give JSON, such as '{"power": 2}'""",
        ),
        (
            "--num_train_epochs 1.5",
            "--args: num_train_epochs: 1.5 is no whole number of epochs",
        ),
        ("--warmup_ratio 1", "--args: warmup_ratio: 1.0 is not below 1; give warmup_steps"),
        ("--label_smoothing_factor 0.1", "--args: label_smoothing_factor: '0.1' has no key of unipar; take it out"),
        (
            "--per_device_train_batchsize 4",
            "--args: per_device_train_batchsize: there is no such argument (did you mean "
            "'per_device_train_batch_size'?); correct it, or take it out",
        ),
        ("--bf16 maybe", "--args: bf16: 'maybe' is neither true nor false; give one of them"),
        (
            "arguments",
            "--args arguments: give a .json or .yaml file of training arguments, or the",
        ),
        ("--run_name 'x", "--args: No closing quotation; close every quotation mark"),
    ],
)
def test_arguments_refused(args: str, wrong: str, tmp_path: Path) -> None:
    """Which argument, and the way out."""
    with pytest.raises(ConfigError) as e:
        ds(tmp_path, LEAST, STEPS, strict=False, args=args)
    assert wrong in str(e.value)


@pytest.mark.parametrize(
    ("args", "timing"),
    [
        ("--lr_scheduler_type linear", "transformers"),
        ("--lr_scheduler_type cosine --warmup_steps 5", "transformers"),
        ("--lr_scheduler_type constant_with_warmup --warmup_steps 5", "transformers"),
        ("--lr_scheduler_type constant", None),
    ],
)
def test_the_timing_of_the_trainers_rates(args: str, timing: str | None, tmp_path: Path) -> None:
    """The curve begins and ends as the Trainer's, where it has a beginning or an end."""
    made = ds(tmp_path, LEAST, STEPS, strict=False, args=args)
    assert said(made)["train"]["schedule"].get("timing") == timing


def test_the_timing_of_another_schedule(tmp_path: Path) -> None:
    """Neither a scheduler of DeepSpeed's config nor one by --set has the Trainer's."""
    theirs = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 100}}
    file = LEAST | {"scheduler": theirs}
    assert "timing" not in said(ds(tmp_path, file, strict=False))["train"]["schedule"]
    made = ds(tmp_path, LEAST, STEPS, "train.schedule={name: linear}", strict=False, args="--learning_rate 3e-4")
    assert said(made)["train"]["schedule"] == {"name": "linear"}


@pytest.mark.parametrize(
    ("keys", "decay"),
    [({"optimizer": ADAMW}, None), ({}, "transformers")],
)
def test_whose_rule_of_decay(keys: dict[str, Any], decay: str | None, tmp_path: Path) -> None:
    """An optimizer of DeepSpeed's config decays everything; that of the Trainer leaves out biases and norms."""
    file = {"train_batch_size": 32} | keys
    made = ds(tmp_path, file, STEPS, strict=False, args="--learning_rate 3e-4 --weight_decay 0.1")
    assert said(made)["train"]["optimizer"].get("decay") == decay


def test_keys_that_deepspeed_takes_under_two_names(tmp_path: Path) -> None:
    """The short name means the same; two values for one key are refused."""
    zero = {"stage": 3, "max_live_parameters": 5_000_000}
    made = ds(tmp_path, {**LEAST, "zero_optimization": zero}, STEPS)
    assert said(made)["options"] == {"deepspeed": {"live": 5_000_000}}
    with pytest.raises(ConfigError, match="max_live_parameters and stage3_max_live_parameters are one key, with two"):
        ds(tmp_path, {**LEAST, "zero_optimization": {**zero, "stage3_max_live_parameters": 7}}, STEPS)


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ({"compile": {"disable": False, "backend": "inductor"}}, ("model", "compile"), "model"),
        ({"compile": {"backend": "eager"}}, ("model", "compile"), {"what": "model", "backend": "eager"}),
        ({"compile": {"disable": True}}, ("model",), None),
        ({"tensor_parallel": {"autotp_size": 2}}, ("parallel",), {"data": 2, "tensor": 2}),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}},
            ("parallel",),
            {"data": 4, "expert": 2},
        ),
        ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, ("parallel",), {"data": 4}),
    ],
)
def test_newer_sections(change: dict[str, Any], path: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    """Compilation, and matrices split over ranks."""
    found: Any = said(ds(tmp_path, {**LEAST, **change}, STEPS, world=4))
    for name in path:
        found = (found or {}).get(name)
    assert found == value


def test_sequences_that_deepspeed_splits(tmp_path: Path) -> None:
    """Its Ulysses is a layer of the model; native trades positions for heads in any model, with fp32 weights."""
    file = {**LEAST, "zero_optimization": {"stage": 3, "max_live_parameters": 5_000_000}, "bf16": {"enabled": True}}
    made = ds(tmp_path, {**file, "sequence_parallel_size": 2}, STEPS, world=4, strict=False)
    result = said(made)
    assert (result["backend"], result["options"]) == ("native", {"native": {"attention": "ulysses"}})
    assert result["parallel"] == {"data": 2, "shard": "parameters", "context": 2}
    assert result["train"]["precision"] == "bf16-mixed"
    wrong = "bf16: bf16-master does not go with sequence_parallel_size"
    with pytest.raises(ConfigError, match=wrong):
        ds(tmp_path, {**file, "sequence_parallel_size": 2}, STEPS, world=4)
    with pytest.raises(ConfigError, match="sequence_parallel_size: 3 does not divide 4 ranks"):
        ds(tmp_path, {**LEAST, "sequence_parallel_size": 3}, STEPS, world=4)


def test_sequences_that_accelerate_splits(tmp_path: Path) -> None:
    """`sp_size` is Ulysses, `cp_size` is torch's ring."""
    text = YAML + "parallelism_config: {parallelism_config_%s_size: 2}\n"
    for name, options in {"sp": {"native": {"attention": "ulysses"}}, "cp": None}.items():
        result = said(yaml(tmp_path, text % name, strict=False))
        assert (result["backend"], result["parallel"]["context"]) == ("native", 2)
        assert result.get("options") == options


def test_a_mesh_on_several_machines(tmp_path: Path) -> None:
    """Copies, shards and matrices divide the ranks of all machines."""
    text = YAML.replace("MULTI_GPU", "FSDP").replace("num_processes: 2", "num_processes: 16")
    text = text.replace("num_machines: 1", "num_machines: 2") + (
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4, "
        "parallelism_config_tp_size: 2}\n"
    )
    result = said(yaml(tmp_path, text, strict=False))
    assert result["machines"] == {"nodes": 2}
    assert (result["backend"], result["parallel"]["data"], result["parallel"]["tensor"]) == ("native", 8, 2)
    wrong = "parallelism_config: 8 x 2 = 16 is not the number of ranks, 32; give --world 16"
    with pytest.raises(ConfigError, match=wrong):
        yaml(tmp_path, text, strict=False, world=32)


def test_a_config_for_gpus_on_a_machine_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offloaded leaves a GPU, so the config says so."""
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 0)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    made = ds(tmp_path, {**LEAST, "zero_optimization": zero}, STEPS)
    assert said(made)["device"] == "cuda"
    assert "zero_optimization.offload_optimizer.pin_memory: it is about speed" in made.left_out
