"""`unipar import`: what each key of another library's config becomes, and what is refused with which sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.imports import ASKED, LEAST, STEPS, YAML, ds, said, yaml
from unipar.config import config_source as source
from unipar.conversion.export import export_script
from unipar.conversion.import_config import import_library_config, write_config
from unipar.errors import ConfigError, OutExists


def sentence(error: pytest.ExceptionInfo[ConfigError], folder: Path) -> str:
    return str(error.value).replace(f"{folder}/", "")


def test_the_whole_of_a_ds_config(tmp_path: Path) -> None:
    """Each key's meaning, the ranks that follow from three batch sizes, and a comment where it was not plain."""
    told = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 100,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 200},
        },
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    }
    made = ds(tmp_path, told)
    assert said(made) == {
        "backend": "deepspeed",
        "parallel": {"data": 8, "shard": "gradients"},
        "batch": {"total": 64, "micro": 4},
        "train": {
            "clip": 1.0,
            "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-8},
            "schedule": {"name": "linear", "warmup": 10},
            "steps": 200,
            "precision": "bf16-master",
        },
        "options": {"deepspeed": {"reduce": 500_000_000}},
    }
    lines = made.text.splitlines()
    assert lines[0] == "# yaml-language-server: $schema=unipar.schema.json"
    assert "  data: 8                                       # 64 / (4 x 2)" in lines
    assert (
        "  clip: 1.0                                     # DeepSpeed's own default, where the file says nothing"
        in lines
    )
    assert (
        "    name: adamw                                 # DeepSpeed's Adam is AdamW unless adam_w_mode is false"
        in lines
    )
    assert "#   steps_per_print: unipar logs every log.every steps" in lines
    again = tmp_path / "again.yaml"
    again.write_text(made.text, encoding="utf-8")
    assert source.load_config_file(again).config == made.config


@pytest.mark.parametrize(
    ("change", "sets", "key", "value"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, (), "batch", {"total": 32, "micro": 4}),
        ({"train_batch_size": None, "train_micro_batch_size_per_gpu": 4}, (), "batch", {"micro": 4, "accumulate": 1}),
        ({"train_batch_size": "auto"}, ("batch.total=16",), "batch", {"total": 16}),
        (
            {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
            ("batch.micro=4", "batch.accumulate=2"),
            "batch",
            {"micro": 4, "accumulate": 2},
        ),
        ({"gradient_accumulation_steps": 2}, (), "batch", {"total": 32, "accumulate": 2}),
        ({"gradient_clipping": 0.0}, (), "train.clip", None),
        ({"gradient_clipping": "auto"}, ("train.clip=0.5",), "train.clip", 0.5),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, (), "train.precision", None),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, (), "train.optimizer.momentum", 0.9),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}},
            (),
            "train.optimizer.name",
            "adam",
        ),
        ({"dataloader_drop_last": True}, (), "data.last_batch", "drop"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6, "stage3_max_live_parameters": 5}},
            (),
            "options.deepspeed",
            {"reduce": 1_000_000},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
            ("device=cuda",),
            "options.deepspeed",
            {"offload_parameters": "cpu"},
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
            ("train.schedule={name: constant, warmup: 9}",),
            "train.schedule",
            {"name": "constant", "warmup": 9},
        ),
    ],
)
def test_one_key(change: dict[str, Any], sets: tuple[str, ...], key: str, value: Any, tmp_path: Path) -> None:
    """The value is the file's, or that of `--set` where the file leaves it open."""
    told = {k: v for k, v in (LEAST | change).items() if v is not None}
    found: Any = said(ds(tmp_path, told, STEPS, *sets))
    for name in key.split("."):
        found = (found or {}).get(name)
    assert found == value


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            {"train_batch_size": "auto"},
            "train_batch_size: \"auto\": give it with --set batch='{total: 32, micro: 4}'",
        ),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"},
            'train_batch_size: "auto", gradient_accumulation_steps: "auto", and batch.micro alone does not say the '
            "batch: give it with --set batch.accumulate=1",
        ),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "train_batch_size: 30 is not a multiple of train_micro_batch_size_per_gpu x gradient_accumulation_steps "
            "(4 x 2 = 8)",
        ),
        ({"gradient_clipping": "auto"}, 'gradient_clipping: "auto": give it with --set train.clip=1.0'),
        (
            {"optimizer": None},
            "optimizer, which your script makes: give it with --set train.optimizer='{name: adamw, lr: 3.0e-4}'",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            'optimizer.params.lr: "auto": give it with --set train.optimizer.lr=3.0e-4',
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {}}},
            "optimizer.type: Lamb is not among sgd, adam, adamw, rmsprop and muon; choose a value with --set train."
            "optimizer=",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {}}},
            "scheduler.type: OneCycle is not among WarmupLR, WarmupDecayLR, WarmupCosineLR; "
            "choose a value with --set train.schedule=...",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
            "scheduler.params.warmup_type: log (DeepSpeed's default, logarithmic); unipar's warm-up is linear; "
            "choose a value with --set train.schedule=...",
        ),
        (
            {"zero_optimisation": {"stage": 2}},
            "zero_optimisation: there is no such key; did you mean 'zero_optimization'?",
        ),
        (
            {"zero_optimization": {"stage": 2, "stge": 1}},
            "zero_optimization.stge: there is no such key; did you mean 'stage'?",
        ),
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage: 7 is not one of 0, 1, 2 and 3"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights: ZeRO++ rounds weights, which changes the numbers; "
            "leave it out with --leave zero_optimization.zero_quantized_weights",
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled; leave one of them"),
        (
            {"autotuning": {"enabled": True}},
            "autotuning: unipar does not tune settings; leave it out with --leave autotuning",
        ),
        ({"steps_per_print": 5, "train_batch_size": "many"}, "train_batch_size: 'many' is not a whole number"),
        (
            {"gradient_allreduce_op": "sum"},
            "gradient_allreduce_op: unipar always takes the mean; leave it out with --leave gradient_allreduce_op",
        ),
    ],
)
def test_a_ds_config_refused(change: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    """The key, the reason, and what to type."""
    told = {k: v for k, v in (LEAST | change).items() if v is not None}
    with pytest.raises(ConfigError) as e:
        ds(tmp_path, told, STEPS)
    assert wrong in sentence(e, tmp_path)


def test_all_at_once(tmp_path: Path) -> None:
    """Every key that stands in the way, so that one more call is enough."""
    with pytest.raises(ConfigError) as e:
        ds(tmp_path, {"zero_optimization": {"stage": 1}})
    assert sentence(e, tmp_path) == (
        "ds_config.json cannot be converted as it is:\n"
        "  - train_batch_size: give it with --set batch='{total: 32, micro: 4}'\n"
        "  - optimizer, which your script makes: give it with --set train.optimizer='{name: adamw, lr: 3.0e-4}'\n"
        "  - how long to train, which the file does not say: give it with --set train.steps=1000"
    )


def test_a_key_left_out_as_asked(tmp_path: Path) -> None:
    """`--leave` goes on without it and says so; one that is not there is a mistake."""
    told = {**LEAST, "autotuning": {"enabled": True}, "mystery": 1}
    made = ds(tmp_path, told, STEPS, leave=["autotuning", "mystery"])
    assert "autotuning: unipar does not tune settings (left out by --leave)" in made.left_out
    assert "mystery: not known (left out by --leave)" in made.left_out
    with pytest.raises(ConfigError) as e:
        ds(tmp_path, LEAST, STEPS, leave=["autotuning"])
    assert sentence(e, tmp_path) == "ds_config.json: --leave autotuning: the file has no such key"
    with pytest.raises(ConfigError, match=r"optimizer\.type: Lamb is not among"):  # left out, it would be another one
        ds(tmp_path, {**LEAST, "optimizer": {"type": "Lamb"}}, STEPS, leave=["optimizer.type"])


def test_there_and_back(tmp_path: Path) -> None:
    """A config that was exported for DeepSpeed and imported again has the same meaning."""
    told: dict[str, Any] = {
        "task": {"use": f"{Path(__file__).parents[1]}/support/traveller.py:Line"},
        "backend": "deepspeed",
        "device": "cpu",
        "parallel": {"data": 2, "shard": "parameters"},
        "batch": {"total": 8, "micro": 2},
        "train": {
            "steps": 5,
            "optimizer": {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
            "clip": 0.5,
            "precision": "bf16-master",
        },
    }
    before = source.load_given_config(told)
    folder = export_script(before, "deepspeed", tmp_path / "made").folder
    after = import_library_config(folder / "ds_config.json", ["train.steps=5", "device=cpu"]).config
    same = before.config.train.model_copy(update={"optimizer": after.train.optimizer})
    assert (after.backend, after.parallel, after.batch, after.train) == (
        "deepspeed",
        before.config.parallel,
        before.config.batch,
        same,
    )
    was = before.config.train.optimizer.model_dump(exclude={"fused"})
    assert after.train.optimizer.model_dump(exclude={"fused"}) == was


def test_deepspeed_climbs_two_steps_later() -> None:
    """DeepSpeed's own scheduler does what the comment beside a warm-up says."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    from unipar.config.sections.schedule import Constant

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    rates: list[float] = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        theirs.step()
    ours = [Constant(warmup=4).factor(step, 8) for step in range(6)]
    assert rates == pytest.approx([0.0, 0.0, *ours])


def test_an_accelerate_yaml(tmp_path: Path) -> None:
    """Ranks and precision are its own; batch, optimizer and length are asked for, as the script says them."""
    with pytest.raises(ConfigError) as e:
        yaml(tmp_path, YAML)
    assert "batch, which your script says: give it with --set batch='{total: 32, micro: 4}'" in str(e.value)
    assert said(yaml(tmp_path, YAML, *ASKED)) == {
        "backend": "accelerate",
        "parallel": {"data": 2},
        "batch": {"total": 32},
        "train": {"precision": "bf16-mixed", "optimizer": {"name": "sgd", "lr": 0.1}, "steps": 100},
    }


def test_its_fsdp(tmp_path: Path) -> None:
    """Strategy, wrapping and precision."""
    text = YAML.replace("MULTI_GPU", "FSDP") + (
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_auto_wrap_policy: NO_WRAP\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    )
    made = said(yaml(tmp_path, text, *ASKED))
    assert (made["parallel"], made["model"]) == ({"data": 2, "shard": "parameters"}, {"blocks": "none"})
    assert made["train"]["precision"] == "bf16-master"


def test_its_deepspeed(tmp_path: Path) -> None:
    """The ds_config.json that it names is read too, from beside it."""
    (tmp_path / "ds.json").write_text(json.dumps({**LEAST, "zero_optimization": {"stage": 3}}), encoding="utf-8")
    text = YAML.replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config: {deepspeed_config_file: ds.json}\n"
    made = said(yaml(tmp_path, text, STEPS))
    assert made["parallel"] == {"shard": "parameters", "data": 2}
    assert made["batch"] == {"total": 32}
    assert made["train"]["optimizer"]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (YAML + "num_procesess: 3\n", "num_procesess (line 9): there is no such key; did you mean 'num_processes'?"),
        (
            YAML.replace("MULTI_GPU", "XLA"),
            "distributed_type (line 3): XLA is not among NO, MULTI_CPU, MULTI_GPU, FSDP",
        ),
        (
            YAML.replace("num_machines: 1", "num_machines: 4"),
            "num_processes: 2 ranks cannot be divided among 4 machines; give a multiple of 4 with --world",
        ),
        (YAML.replace("bf16\n", "fp8\n", 1), "mixed_precision (line 7): fp8 is not among no, fp16, bf16"),
        (
            YAML + "fp8_config: {backend: TE}\n",
            "fp8_config (line 9): unipar has no fp8; leave it out with --leave fp8_config",
        ),
        (YAML + "a: !!python/object:x {}\n", "line 9: the tag !!python/object:x is refused"),
        (YAML + "debug: true\ndebug: false\n", "line 10: the key 'debug' is given twice"),
        ("- 1\n", "line 1: a mapping of keys and values is wanted"),
        (
            "x: 1\n",
            "none of its keys is known; give a ds_config.json, an accelerate.yaml or a file of training arguments",
        ),
    ],
)
def test_an_accelerate_yaml_refused(text: str, wrong: str, tmp_path: Path) -> None:
    """The key, its line, the reason."""
    with pytest.raises(ConfigError) as e:
        yaml(tmp_path, text, *ASKED)
    assert wrong in str(e.value)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{\n "a": 1,\n b}', "ds_config.json, line 3: Expecting property name enclosed in double quotes"),
        ('{"bf16": 1, "bf16": 2}', "ds_config.json: the key 'bf16' is given twice; remove one"),
        ('{"bf16": NaN}', "ds_config.json: the number NaN is not finite"),
        ("[" * 100_000, "ds_config.json: nested too deep to be a config"),
        ("[1]", "ds_config.json, line 1: a mapping of keys and values is wanted"),
        (" " * (2**20 + 1), "ds_config.json, line 1: the file is larger than 1 MiB, so it is not a config"),
    ],
)
def test_a_file_that_is_none(text: str, wrong: str, tmp_path: Path) -> None:
    """Refused before any key is looked at."""
    with pytest.raises(ConfigError) as e:
        ds(tmp_path, text)
    assert sentence(e, tmp_path) == wrong


def test_a_link_to_another_folder(tmp_path: Path) -> None:
    """A ds_config that the yaml names lies where it says."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/ds.json").write_text("{}", encoding="utf-8")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/ds.json").symlink_to(tmp_path / "elsewhere/ds.json")
    text = YAML.replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config: {deepspeed_config_file: ds.json}\n"
    with pytest.raises(ConfigError) as e:
        yaml(tmp_path / "here", text)
    assert "ds.json is a link to" in str(e.value)
    assert "outside of its folder; name the file itself" in str(e.value)


def test_where_it_is_written(tmp_path: Path) -> None:
    """A file that is there stays, without --overwrite; nothing goes through a link."""
    made = ds(tmp_path, LEAST, STEPS)
    out = tmp_path / "out.yaml"
    write_config(made.text, out)
    with pytest.raises(OutExists) as e:
        write_config(made.text, out)
    assert str(e.value) == f"{out}: it already exists; name another file with -o, or write over it (--overwrite)"
    write_config(made.text, out, overwrite=True)
    assert out.read_text("utf-8") == made.text
    (tmp_path / "link.yaml").symlink_to(out)
    with pytest.raises(OutExists) as e:
        write_config(made.text, tmp_path / "link.yaml", overwrite=True)
    assert str(e.value) == f"{tmp_path}/link.yaml: it is a link; name the file itself with -o"
    with pytest.raises(ConfigError) as f:
        write_config(made.text, tmp_path / "nowhere/x.yaml")
    assert (
        str(f.value)
        == f"{tmp_path}/nowhere/x.yaml: it cannot be written (No such file or directory); name another file with -o"
    )
