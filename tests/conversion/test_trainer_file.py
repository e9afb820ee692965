"""A trainer's own file as the imported one: TrainingArguments, recipes, axolotl's and LLaMA-Factory's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.imports import said
from unipar.conversion.import_config import ImportedConfig, import_library_config
from unipar.distributed import accelerators
from unipar.errors import ConfigError

RECIPE: dict[str, Any] = {
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "output_dir": "out",
}
AXOLOTL: dict[str, Any] = {
    "base_model": "some/model",
    "micro_batch_size": 2,
    "learning_rate": "2e-4",
    "optimizer": "adamw_bnb_8bit",
    "bf16": "auto",
    "lora_r": 8,
    "warmup_steps": 10,
}


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "count_visible_gpus", lambda: 8)


def bring(folder: Path, data: dict[str, Any], *sets: str, **more: Any) -> ImportedConfig:
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(data), encoding="utf-8")
    return import_library_config(file, sets, **more)


def test_a_recipe(tmp_path: Path) -> None:
    """A recipe names no library, so that each rank has a copy, which is told; its warm-up is a share of the steps."""
    made = bring(tmp_path, RECIPE)
    assert said(made) == {
        "backend": "native",
        "batch": {"micro": 2, "accumulate": 4},
        "train": {
            "optimizer": {"name": "adamw", "lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8},
            "clip": 1.0,
            "precision": "bf16-mixed",
            "epochs": 1,
            "schedule": {"name": "cosine", "warmup": 0.1, "timing": "transformers"},
            "seed": 42,
        },
    }
    assert "backend: 'native'" in made.assumed
    assert "output_dir: say out" in made.left_out
    assert "# Made by `unipar import` from recipe.yaml, training arguments." in made.text.splitlines()


def test_its_library(tmp_path: Path) -> None:
    """The config that `deepspeed` names is carried, and its "auto" are the recipe's; so is a tool's own name of one."""
    (tmp_path / "zero.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"})
    )
    made = bring(tmp_path, RECIPE | {"deepspeed": "zero.json", "max_grad_norm": 0.5})
    result = said(made)
    assert (result["backend"], result["parallel"]) == ("deepspeed", {"shard": "parameters"})
    assert (result["train"]["precision"], result["train"]["clip"]) == ("bf16-master", 0.5)
    assert "training arguments with a ds_config.json" in made.text
    named = said(bring(tmp_path, RECIPE | {"deepspeed": "zero2_offload"}))
    assert named["parallel"] == {"shard": "gradients"}
    assert named["options"] == {"deepspeed": {"offload_optimizer": "cpu"}}
    with pytest.raises(ConfigError, match=r"deepspeed: 'mine' is neither a \.json file nor one of zero0 to zero3;"):
        bring(tmp_path, RECIPE | {"deepspeed": "mine"})


@pytest.mark.parametrize(
    ("keys", "parallel", "model"),
    [
        ({"fsdp": "full_shard auto_wrap"}, {"shard": "parameters"}, None),
        ({"fsdp": ["shard_grad_op", "auto_wrap"]}, {"shard": "gradients"}, None),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, {"shard": "gradients"}, None),
        ({"fsdp": "full_shard offload"}, {"shard": "parameters"}, {"offload": "parameters"}),
        ({"fsdp_config": {"fsdp_activation_checkpointing": True}}, {"shard": "parameters"}, {"recompute": "blocks"}),
        ({"dist_config": {"name": "fsdp2"}}, {"shard": "parameters"}, None),
        ({"fsdp": [], "fsdp_config": None, "tensor_parallel_size": 2}, {"tensor": 2}, None),
        ({"sequence_parallel_degree": 4}, {"context": 4}, None),
    ],
)
def test_how_it_splits(
    keys: dict[str, Any], parallel: dict[str, Any], model: dict[str, Any] | None, tmp_path: Path
) -> None:
    """FSDP's words and options, and the sizes of other axes."""
    made = said(bring(tmp_path, RECIPE | keys))
    assert (made["parallel"], made.get("model")) == (parallel, model)
    assert made["train"]["precision"] == ("bf16-master" if "shard" in parallel else "bf16-mixed")


@pytest.mark.parametrize("name", ["sequence_parallel_size", "ulysses_sequence_parallel_size"])
def test_positions_traded_for_heads(name: str, tmp_path: Path) -> None:
    """Sequences are cut as by other arguments, and attention is computed as these tools do."""
    made = said(bring(tmp_path, RECIPE | {name: 4}))
    assert made["parallel"] == {"context": 4}
    assert made["options"] == {"native": {"attention": "ulysses"}}


def test_names_of_axolotl(tmp_path: Path) -> None:
    """They are the Trainer's under other names, with other defaults; 8-bit states are torchao's, which is told."""
    made = bring(tmp_path, AXOLOTL)
    result = said(made)
    assert result["batch"] == {"micro": 2, "accumulate": 1}
    assert result["train"]["epochs"] == 1
    assert result["train"]["schedule"] == {"name": "cosine", "warmup": 10, "timing": "transformers"}
    assert result["train"]["optimizer"]["lr"] == 2e-4
    assert result["train"]["optimizer"]["name"] == "adamw-8bit"
    (told,) = (note for note in made.assumed if note.startswith("train.optimizer.name: adamw_bnb_8bit: adamw-8bit, "))
    assert "with torchao's codes, not bitsandbytes'; in 8 bits are weights whose rows are blocks of 256" in told
    assert "train.precision: 'auto': bf16, as on a GPU that computes in it" in made.assumed
    assert "train.epochs: 1" in made.assumed
    assert "lora_r: it is about the model, which your task makes" in made.left_out
    assert "# assumed: num_train_epochs is 1 by default in axolotl" in made.text


def test_strict_assumes_nothing(tmp_path: Path) -> None:
    """Under --strict what would be assumed is asked for, all at once, and --set gives it."""
    with pytest.raises(ConfigError) as caught:
        bring(tmp_path, AXOLOTL, strict=True)
    for sentence in (
        "optimizer (line 1): adamw_bnb_8bit: unipar has adamw-8bit, with torchao's codes, not bitsandbytes'; in 8 bits",
        "(fp32 under the Trainer) too; or adamw, with states in fp32; choose a value with --set train.optimizer.name=",
        "bf16 (line 1): 'auto': bf16, as on a GPU that computes in it; choose a value with --set train.precision=...",
        "the library that the launcher says: give it with --set backend=native",
        "gradient_accumulation_steps: give it with --set batch.accumulate=1",
        "how long to train, which the file does not say: give it with --set train.steps=1000",
        "lr_scheduler_type: give it with --set train.schedule.name=linear",
    ):
        assert sentence in str(caught.value)
    sets = (
        "backend=native",
        "batch.accumulate=3",
        "train.optimizer.name=adamw",
        "train.precision=bf16-mixed",
        "train.epochs=2",
        "train.schedule.name=linear",
    )
    assert bring(tmp_path, AXOLOTL, *sets, strict=True).config.train.epochs == 2


def test_a_file_that_is_named_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trainers take it, which are started in a folder above; a file beside this one comes first."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    recipe = RECIPE | {"deepspeed": "zero.json"}
    assert said(bring(tmp_path / "recipes", recipe))["parallel"] == {"shard": "parameters"}
    (tmp_path / "recipes" / "zero.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    assert said(bring(tmp_path / "recipes", recipe))["parallel"] == {"shard": "optimizer"}
    with pytest.raises(ConfigError) as caught:
        bring(tmp_path / "recipes", recipe | {"deepspeed": "none.json"})
    assert str(caught.value).endswith(
        f"recipe.yaml: it names none.json, and there is no such file, neither from its folder "
        f"({tmp_path}/recipes/none.json) nor from the working directory: call import in the folder from which the path "
        "leads there"
    )


def test_arguments_beside_it(tmp_path: Path) -> None:
    """Those on the command line win, by whichever name."""
    made = bring(tmp_path, AXOLOTL, args="--per_device_train_batch_size 5 --max_steps 70")
    assert said(made)["batch"] == {"micro": 5, "accumulate": 1}
    assert said(made)["train"]["steps"] == 70


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optim": "lion"}, "optim (line 1): lion is neither sgd nor rmsprop nor a kind of adamw, such as"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha (line 1): 5 has no key of unipar; leave it out with --leave"),
        ({"learning_rte": 1e-4},
         "learning_rte (line 1): there is no such argument (did you mean 'learning_rate'?); leave it out with --leave"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor (line 1): 0.1 has no key of unipar; leave it out"),
        ({"logging_steps": 2.5}, "logging_steps (line 1): 2.5 is not a whole number above 0; choose a value with"),
        ({"accelerator_config": {"split_batches": True}},
         "accelerator_config (line 1): split_batches: per_device_train_batch_size is that of all ranks together;"),
        ({"use_galore": True}, "use_galore (line 1): true has no key of unipar; leave it out with --leave use_galore"),
        ({"micro_batch_size": 3}, "micro_batch_size (line 1): 3, but per_device_train_batch_size is 2; leave it out"),
        ({"warmup_ratio": 1.5}, "warmup_ratio (line 1): 1.5 is not below 1; choose a value with --set train.schedule"),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
         "lr_scheduler_kwargs (line 1): num_cycles: 2: a schedule of unipar does not begin again; choose a value with"),
        ({"parallelism_config": {"tp_size": 2}},
         "parallelism_config (line 1): it is carried from the launcher's config alone"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Each says the argument as it is named in the file, the reason and the way out."""
    with pytest.raises(ConfigError) as caught:
        bring(tmp_path, RECIPE | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "schedule"),
    [
        ({"lr_scheduler_type": "cosine_with_restarts"}, {"name": "cosine", "warmup": 0.1}),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 50}, {"name": "inverse-root", "warmup": 50}),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 9}},
         {"name": "inverse-root", "warmup": 0.1, "scale": 9}),
        ({"cosine_min_lr_ratio": 0.1}, {"name": "cosine", "warmup": 0.1, "min_lr_ratio": 0.1}),
        ({"max_steps": 33}, {"name": "cosine", "warmup": 4}),
    ],
)  # fmt: skip
def test_schedules(change: dict[str, Any], schedule: dict[str, Any], tmp_path: Path) -> None:
    """A share of the steps stays a share unless the steps are known."""
    assert said(bring(tmp_path, RECIPE | change))["train"]["schedule"] == schedule | {"timing": "transformers"}


@pytest.mark.parametrize(
    ("keys", "sections"),
    [
        ({"eval_strategy": "steps", "eval_steps": 50}, {"eval": {"every": 50}}),
        ({"evaluation_strategy": "steps", "logging_steps": 20}, {"eval": {"every": 20}, "log": {"every": 20}}),
        ({"eval_strategy": "steps", "eval_steps": 0.25, "max_steps": 90}, {"eval": {"every": 23}}),
        ({"eval_strategy": "no", "save_strategy": "no", "save_total_limit": 2}, {}),
        ({"save_steps": 100, "save_total_limit": 2}, {"checkpoint": {"every": 100, "keep": 2}}),
        ({"save_strategy": "steps", "save_total_limit": 0}, {"checkpoint": {"every": 500}}),
        ({"save_strategy": False, "save_steps": 10}, {}),
        ({"save_strategy": "epoch", "save_total_limit": 1}, {"checkpoint": {"keep": 1}}),
        ({"use_cpu": True}, {"device": "cpu"}),
        ({"no_cuda": True, "seed": 7}, {"device": "cpu"}),
        ({"train_sampling_strategy": "sequential"}, {"data": {"shuffle": False}}),
        ({"dataloader_num_workers": 0, "dataloader_drop_last": True}, {"data": {"last_batch": "drop"}}),
        ({"activation_checkpointing": True}, {"model": {"recompute": "blocks"}}),
        ({"fsdp": [], "fsdp_config": {"min_num_params": 0, "xla": False}}, {}),
    ],
)
def test_what_is_not_the_step(keys: dict[str, Any], sections: dict[str, Any], tmp_path: Path) -> None:
    """When it logs, evaluates and saves, on which device, and the order of samples."""
    made = said(bring(tmp_path, RECIPE | keys))
    assert {name: its for name, its in made.items() if name not in ("backend", "batch", "train")} == sections


@pytest.mark.parametrize(
    ("keys", "remark"),
    [
        ({"eval_strategy": "epoch"}, "eval_strategy: epoch: say eval.every in steps"),
        ({"save_strategy": "best"}, "save_strategy: best: say checkpoint.every in steps"),
        ({"eval_steps": 50}, "eval_steps: it has no effect, as eval_strategy is no"),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, "eval_steps: a share of the steps; say eval.every"),
        (
            {"eval_strategy": "steps", "eval_steps": 500, "max_steps": 90},
            "eval_steps: 500 is more than the 90 steps of the run",
        ),
        ({"logging_steps": 0.1}, "logging_steps: a share of the steps; say log.every"),
        ({"logging_strategy": "epoch"}, "logging_strategy: epoch: say log.every in steps"),
        ({"do_eval": True}, "do_eval: say eval.every"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: say checkpoint.best"),
        ({"data_seed": 3}, "data_seed: the order of samples comes from train.seed"),
        ({"accelerator_config": {"even_batches": False}},
         "accelerator_config.even_batches: no setting of training in unipar"),
    ],
)  # fmt: skip
def test_remarks(keys: dict[str, Any], remark: str, tmp_path: Path) -> None:
    """One line for each argument that is not carried and is not at its default."""
    assert sorted(bring(tmp_path, RECIPE | keys).left_out) == sorted(["output_dir: say out", remark])


def test_members_of_enumerations(tmp_path: Path) -> None:
    """A member that was written as text means its value."""
    written = {
        "lr_scheduler_type": "SchedulerType.COSINE",
        "optim": "OptimizerNames.ADAMW_BNB",
        "save_strategy": "SaveStrategy.NO",
        "eval_strategy": "IntervalStrategy.STEPS",
        "eval_steps": 5,
    }
    made = bring(tmp_path, RECIPE | written)
    assert (made.config.train.schedule.name, made.config.train.optimizer.name) == ("cosine", "adamw-8bit")
    assert (made.config.eval.every, made.config.checkpoint) == (5, None)


def test_samples_beside_others_of_their_length(tmp_path: Path) -> None:
    """They come in a random order, which is told; --strict refuses it."""
    made = bring(tmp_path, RECIPE | {"group_by_length": True})
    assert "data.shuffle: samples come in a random order, not beside others of their length" in made.assumed
    with pytest.raises(ConfigError, match=r"group_by_length \(line 1\): samples come in a random order"):
        bring(tmp_path, RECIPE | {"group_by_length": True}, "backend=native", strict=True)
