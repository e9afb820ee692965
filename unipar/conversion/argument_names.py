"""Names of training arguments, of Hugging Face's Trainer and of axolotl, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TRAINER_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
    "optim": "adamw_torch_fused",
}
"""Defaults of the Trainer's own arguments, where neither the file nor --args says otherwise."""

OTHER_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("lr_scheduler_kwargs", "optim_args", "tf32", "activation_checkpointing_kwargs")),
    **dict.fromkeys(("gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode")),
    **dict.fromkeys(("liger_kernel_config", "torch_empty_cache_steps", "run_name", "trackio_space_id")),
    **dict.fromkeys(("trackio_bucket_id", "trackio_static_space_id", "eval_steps", "eval_accumulation_steps")),
    **dict.fromkeys(("save_total_limit", "hub_private_repo", "hub_model_id", "hub_revision")),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better", "data_seed", "parallelism_config", "label_names")),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "ddp_find_unused_parameters")),
    **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "fsdp")),
    **dict.fromkeys(("fsdp_config", "resume_from_checkpoint", "output_dir")),
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "gradient_checkpointing"), False),
    **dict.fromkeys(("activation_checkpointing", "torch_compile", "use_liger_kernel", "use_cache"), False),
    **dict.fromkeys(("auto_find_batch_size", "logging_first_step", "prediction_loss_only", "eval_on_start"), False),
    **dict.fromkeys(("eval_use_gather_object", "batch_eval_metrics", "save_only_model", "save_on_each_node"), False),
    **dict.fromkeys(("enable_jit_checkpoint", "push_to_hub", "hub_always_push", "load_best_model_at_end"), False),
    **dict.fromkeys(("ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism"), False),
    **dict.fromkeys(("use_cpu", "dataloader_drop_last", "dataloader_persistent_workers"), False),
    **dict.fromkeys(("do_eval", "do_predict"), False),
    **dict.fromkeys(("average_tokens_across_devices", "logging_nan_inf_filter", "eval_do_concat_batches"), True),
    **dict.fromkeys(("dataloader_in_order", "remove_unused_columns", "skip_memory_metrics"), True),
    **dict.fromkeys(("include_for_metrics", "debug"), ()),
    "max_steps": -1,
    "logging_strategy": "steps",
    "logging_steps": 500,
    "include_num_input_tokens_seen": "no",
    "log_level": "passive",
    "log_level_replica": "warning",
    "report_to": "none",
    "project": "huggingface",
    "eval_strategy": "no",
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
    "save_strategy": "steps",
    "save_steps": 500,
    "hub_strategy": "every_save",
    "hub_token": "<HUB_TOKEN>",
    "dataloader_num_workers": 0,
    "train_sampling_strategy": "random",
    "ddp_timeout": 1800,
    "local_rank": -1,
}
"""Defaults of the Trainer's other arguments; a value that is one of these needs no remark."""

LOADER_DEFAULTS: Mapping[str, Any] = {"even_batches": True, "use_seedable_sampler": True}
"""Defaults in `accelerator_config`, of those that are not off."""

NEVER_TOLD = frozenset({"do_train", "dataloader_pin_memory", "disable_tqdm", "log_on_each_node"})
"""Arguments that need no remark, whatever their value."""

KEY_OF_ARGUMENT = {
    "per_device_train_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulate",
    "learning_rate": "train.optimizer.lr",
    "weight_decay": "train.optimizer.weight_decay",
    "adam_epsilon": "train.optimizer.eps",
    "max_grad_norm": "train.clip",
    "seed": "train.seed",
    "dataloader_num_workers": "data.workers",
}
OPTIMIZER_OF_WORD = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit", "adamw_anyprecision"), "adamw"),
    "sgd": "sgd",
    "rmsprop": "rmsprop",
}
ROUNDED_OPTIMIZERS = ("adamw_torch_4bit", "adamw_torch_fp8")
"""AdamW with states in fewer bits, which is carried as AdamW with fp32 states and told."""

_OF_BITSANDBYTES = (
    "with torchao's codes, not bitsandbytes'; in 8 bits are weights whose rows are blocks of 256, embeddings (fp32 "
    "under the Trainer) too"
)
EIGHT_BITS: Final = "adamw-8bit"
EIGHT_BIT_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), _OF_BITSANDBYTES),
    "adamw_torch_8bit": "by torchao too, with blocks that are the same in every world: in 8 bits are weights whose "
    "rows are blocks of 256",
}
"""AdamW with states of 8 bits, which is EIGHT_BITS where the strategy can hold it; and what differs then."""

AXOLOTL_NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "noisy_embedding_alpha": "neftune_noise_alpha",
}
"""Names of axolotl, each with the Trainer's."""

AXOLOTL_DEFAULTS = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "lr_scheduler_type": "cosine"}
SCHEDULE_OF_WORD = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "cosine_with_restarts": "cosine",
    "inverse_sqrt": "inverse-root",
}
SCHEDULE_DETAILS = {
    "cosine_with_restarts": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "polynomial": ("lr_end", "power"),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "decay_type", "min_lr_ratio"),
}
"""Names in `lr_scheduler_kwargs` that are carried, by schedule."""

SHAPE_OF_WORD = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
READ_ARGUMENTS = frozenset(
    {
        *TRAINER_DEFAULTS,
        *KEY_OF_ARGUMENT,
        *("max_steps", "warmup_ratio", "bf16", "fp16", "gradient_checkpointing", "torch_compile"),
        *("dataloader_drop_last", "optim", "lr_scheduler_kwargs", "cosine_min_lr_ratio", "pure_bf16"),
        *("group_by_length", "train_sampling_strategy", "use_muon", "optim_config", "optim_args"),
        *("activation_checkpointing", "use_cpu", "no_cuda", "accelerator_config", "logging_strategy", "eval_strategy"),
        *("evaluation_strategy", "logging_steps", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
    }
)
RMSPROP_DETAILS = ("alpha", "eps", "momentum", "weight_decay")
"""Numbers in `optim_args` beside `optim: rmsprop`; there is also the flag `centered`."""

MUON_DETAILS: Mapping[str, tuple[str, Any]] = {
    "lr": ("lr", 1e-3),
    "wd": ("weight_decay", 0.1),
    "momentum": ("momentum", 0.95),
    "nesterov": ("nesterov", True),
    "ns_steps": ("ns_steps", 5),
    "adamw_betas": ("adamw.betas", (0.9, 0.95)),
    "adamw_eps": ("adamw.eps", 1e-8),
}
"""Names in LLaMA-Factory's `optim_config: {name: muon}`, each with the key in `train.optimizer` and its default."""

OWN_FORMULAS = {
    "muon": "axolotl's Muon has Newton-Schulz coefficients and a factor of the rate of its own version; unipar's is "
    "that of torch.optim.Muon",
}
"""Optimizers that cannot be carried by name, with the reason."""

UNKNOWN_CHANGES = {
    "label_smoothing_factor": 0,
    "neftune_noise_alpha": None,
    "optim_target_modules": None,
    "length_column_name": "length",
    **dict.fromkeys(("loraplus_lr_ratio", "lr_groups", "embedding_lr", "embedding_lr_scale"), None),
    **dict.fromkeys(("cosine_constant_lr_ratio", "curriculum_sampling"), None),
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini"), False),
}
"""Arguments that change training and have no key of unipar, with the value that changes nothing."""

KEY_TO_SAY = {
    **dict.fromkeys(("evals_per_epoch", "do_eval"), "eval.every"),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), "checkpoint.best"),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "model.compile"),
    "saves_per_epoch": "checkpoint.every",
    **dict.fromkeys(("report_to", "wandb_project", "use_wandb", "use_tensorboard"), "log.to"),
    "early_stopping_patience": "eval.stop",
    "resume_from_checkpoint": "resume",
    "ddp_timeout": "launch.timeout",
    "output_dir": "out",
}
"""Arguments that are left out and have a key of unipar beside training."""

NOT_OF_TRAINING = {
    "it is about the model, which your task makes": (
        *("model", "model_", "base_model", "adapter", "lora_", "peft_", "use_peft", "use_rslora", "use_dora"),
        *("finetuning_type", "tuner_type", "target_modules", "torch_dtype", "dtype", "attn_", "attn_implementation"),
        *("flash_attention", "flash_attn", "load_in_", "quantization_", "trust_remote_code", "unfrozen_parameters"),
    ),
    "it is about the data, which your task reads": (
        *("dataset", "dataset_", "datasets", "dataset_mixture", "dataset_mixer", "train_file", "train_dataset"),
        *("cutoff_len", "sequence_len", "max_length", "max_seq_length", "block_size", "max_samples", "template"),
        *(
            "chat_template",
            "sample_packing",
            "packing",
            "pad_to_sequence_len",
            "val_size",
            "val_set_size",
            "tokenizer_",
        ),
    ),
    "an evaluation reads batch.micro samples at a time": ("per_device_eval_batch_size", "eval_batch_size"),
    "model.recompute has no settings of its own": (
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
    ),
    "the order of samples comes from train.seed": ("data_seed",),
    "a loss is a mean over all ranks, by the weight() of your task": ("average_tokens_across_devices",),
    "it is about the loss, which your task computes": ("rl", "stage", "beta", "gamma_beta_ratio", "loss_type"),
}
"""Arguments that belong to the user's code; a word that ends with _ stands for all that begin with it."""
