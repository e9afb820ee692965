"""Words of other libraries for keys, values, strategies and flags, each with what to write here instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MICRO = "write batch.micro (samples of one forward pass on one rank)"
_TOTAL = "write batch.total (samples of one optimizer step over all ranks)"
_ACCUMULATE = "write batch.accumulate, or leave it out: it follows from batch.total and batch.micro"
_RATE = "the learning rate is train.optimizer.lr"
_CLIP = "write train.clip (the largest norm of the gradient)"
_STEPS = "write train.steps (optimizer steps)"
_EPOCHS = "write train.epochs"
_SCHEDULE = "write train.schedule: {name: cosine, warmup: 100}"
_WARMUP = "write train.schedule.warmup (optimizer steps, or a share of all steps such as 0.03)"
_MIN_RATE = "write train.schedule.min_lr_ratio (the last rate divided by the first)"
_DECAY = "write train.optimizer.weight_decay"
_BETAS = "write train.optimizer.betas: [0.9, 0.999]"
_EPS = "write train.optimizer.eps"
_OPTIMIZER = "write train.optimizer: {name: adamw, lr: 1.0e-3}"
_PRECISION = "write train.precision: bf16-mixed, fp8, fp16, fp32 or bf16-master"
_RECOMPUTE = "write model.recompute: blocks"
_COMPILE = "write model.compile: true"
_SHARD = "write parallel.shard: parameters (FSDP2)"
_STAGE = "write backend: deepspeed and parallel.shard: optimizer, gradients or parameters (stages 1, 2, 3)"
_OFFLOAD = "write model.offload: parameters, or with backend: deepspeed options.deepspeed.offload_parameters: cpu"
_OFFLOAD_STATES = "write model.offload: optimizer, or with backend: deepspeed options.deepspeed.offload_optimizer: cpu"
_HYBRID = "write parallel.shard_over (neighbouring ranks that split one copy, or machine)"
_BLOCKS = "write model.blocks: names of the repeated blocks, such as ['layers.*']; auto finds them"
_RANKS = "write parallel.data (ranks that train on different data)"
_MACHINES = "write machines.nodes"
_TENSOR = "write parallel.tensor"
_PIPELINE = "write parallel.pipeline"
_CONTEXT = "write parallel.context"
_ULYSSES = "write parallel.context, and options.native.attention: ulysses"
_EXPERT = "write parallel.expert"
_SEQUENCE = "write parallel.sequence: true, beside parallel.tensor"
_PIPELINE_ORDER = "write parallel.schedule: 1f1b, gpipe, interleaved or zerobubble"
_LOG = "write log.every (optimizer steps)"
_TRACKERS = "write log.to: [tensorboard], [wandb] or [mlflow]"
_TRACE = "write log.trace: {steps: [10, 12]}, or log.memory: true"
_EVALUATE = "write eval.every (optimizer steps)"
_EVAL_BATCHES = "write eval.batches (batches that one evaluation reads)"
_SAVE = "write checkpoint.every (optimizer steps, or a duration such as 30m)"
_KEEP = "write checkpoint.keep (newest checkpoints that stay)"
_BEST = "write checkpoint.best: {metric: loss, mode: min}"
_ASYNC = "write checkpoint.async: true, which is the default"
_RESUME = "write resume: auto, or the path of a checkpoint"
_OUT = "write out (the run folder)"
_WORKERS = "write data.workers"
_LAST = "write data.last_batch: drop"
_SEED = "write train.seed"
_STOP = "write eval.stop: {metric: loss, patience: 3}"
_EMA = "write train.ema: {decay: 0.999}"
_DEVICE = "write device: auto, cpu or cuda"
_UNUSED = "write options.native.find_unused_parameters"
_BUCKETS = "write options.native.bucket_cap_mb"
_RESHARD = "leave it out: parameters are gathered for each block and freed after it"
_OWN_CODE = "leave it out: it is your task's code (model, data, loss)"
_STARTED = "leave it out: `unipar run` starts the ranks, or the launcher that you use names the machines"
_BOTH_EXACT = "leave it out: a last batch that is not full is weighted exactly, in every strategy"
_SCALER = "leave it out: train.precision: fp16 scales the loss, and adapts the scale"
_AUTO_BATCH = "write batch.micro: auto (the largest microbatch that fits)"
_TIMEOUT = "write launch.timeout (seconds that a collective may wait)"

_TRAINER: Mapping[str, str] = {
    "per_device_train_batch_size per_gpu_train_batch_size": _MICRO,
    "per_device_eval_batch_size": "leave it out: an evaluation reads microbatches of batch.micro samples",
    "gradient_accumulation_steps": _ACCUMULATE,
    "learning_rate": _RATE,
    "num_train_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "lr_scheduler_type lr_scheduler": _SCHEDULE,
    "lr_scheduler_kwargs": "write its values under train.schedule",
    "warmup_steps warmup_ratio num_warmup_steps": _WARMUP,
    "weight_decay": _DECAY,
    "adam_beta1 adam_beta2": _BETAS,
    "adam_epsilon": _EPS,
    "max_grad_norm": _CLIP,
    "optim optimizer": _OPTIMIZER,
    "bf16 fp16": _PRECISION,
    "tf32": "leave it out: set torch.backends.fp32_precision in your task's file; `unipar verify` states what it found",
    "gradient_checkpointing activation_checkpointing": _RECOMPUTE,
    "activation_offloading enable_activation_offloading": "write model.offload: activations",
    "gradient_checkpointing_kwargs": "leave it out: model.recompute: blocks recomputes without reentry",
    "torch_compile": _COMPILE,
    "torch_compile_backend": "write model.compile: {what: blocks, backend: inductor}",
    "logging_steps": _LOG,
    "logging_dir output_dir": _OUT,
    "logging_first_step": "write log.every: 1",
    "report_to": _TRACKERS,
    "eval_steps eval_strategy evaluation_strategy": _EVALUATE,
    "save_steps save_strategy": _SAVE,
    "save_total_limit": _KEEP,
    "load_best_model_at_end metric_for_best_model greater_is_better": _BEST,
    "early_stopping_patience early_stopping_threshold": _STOP,
    "resume_from_checkpoint": _RESUME,
    "overwrite_output_dir": "use `unipar run --overwrite`",
    "dataloader_num_workers": _WORKERS,
    "dataloader_drop_last": _LAST,
    "group_by_length": "write batch.tokens (tokens of one step) instead of batch.total",
    "label_smoothing_factor": _OWN_CODE,
    "auto_find_batch_size": _AUTO_BATCH,
    "seed data_seed": _SEED,
    "full_determinism": "leave it out: one seed gives the same numbers in every strategy; `unipar verify` shows it",
    "ddp_find_unused_parameters": _UNUSED,
    "ddp_bucket_cap_mb": _BUCKETS,
    "ddp_timeout": _TIMEOUT,
    "deepspeed": _STAGE,
    "fsdp": _SHARD,
    "use_cpu no_cuda": "write device: cpu",
    "do_train do_eval": "leave it out: `unipar run` trains, and eval.every evaluates",
    "run_name": _OUT,
    "model_name_or_path": "load the model in your task's model(), or write model.weights: file.safetensors",
    "neftune_noise_alpha remove_unused_columns label_names": _OWN_CODE,
    "optim_args": "write them under train.optimizer",
}

_LAUNCH_FILE: Mapping[str, str] = {
    "distributed_type": "write backend: native, deepspeed or accelerate, and parallel.shard",
    "mixed_precision": _PRECISION,
    "downcast_bf16": _PRECISION,
    "num_processes": _RANKS,
    "num_machines": _MACHINES,
    "machine_rank main_process_ip main_process_port same_network rdzv_backend": _STARTED,
    "main_training_function": "write task.use: file.py:Class",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "dynamo_backend dynamo_config": _COMPILE,
    "gradient_clipping": _CLIP,
    "zero_stage deepspeed_config": _STAGE,
    "offload_optimizer_device": _OFFLOAD_STATES,
    "offload_param_device": _OFFLOAD,
    "zero3_save_16bit_model zero3_init_flag": "leave it out: `unipar checkpoint export` writes the full weights",
    "fsdp_config fsdp_version fsdp_sharding_strategy fsdp_use_orig_params": _SHARD,
    "fsdp_reshard_after_forward fsdp_backward_prefetch fsdp_forward_prefetch": _RESHARD,
    "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params": _BLOCKS,
    "fsdp_offload_params": _OFFLOAD,
    "fsdp_activation_checkpointing": _RECOMPUTE,
    "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states": "leave it out: unipar places the weights on the ranks",
    "fsdp_state_dict_type": "leave it out: a checkpoint holds pieces, and any number of ranks reads it",
    "split_batches dispatch_batches": "leave it out: batch.total is the batch of all ranks",
    "even_batches": _BOTH_EXACT,
    "log_with": _TRACKERS,
    "project_dir": _OUT,
    "step_scheduler_with_optimizer": "leave it out: schedules count optimizer steps",
    "dp_replicate_size dp_shard_size": _HYBRID,
    "tp_size": _TENSOR,
    "cp_size": _CONTEXT,
    "sp_size": _ULYSSES,
}

_ZERO: Mapping[str, str] = {
    "train_batch_size": _TOTAL,
    "train_micro_batch_size_per_gpu": _MICRO,
    "zero_optimization stage": _STAGE,
    "zero1 zero2 zero3": _STAGE,
    "offload_param": _OFFLOAD,
    "offload_optimizer": _OFFLOAD_STATES,
    "reduce_bucket_size": "write options.deepspeed.reduce",
    "allgather_bucket_size stage3_gather_bucket_size": "write options.deepspeed.gather",
    "overlap_comm": "write options.deepspeed.overlap",
    "contiguous_gradients": "write options.deepspeed.contiguous",
    "stage3_prefetch_bucket_size": "write options.deepspeed.prefetch",
    "stage3_param_persistence_threshold": "write options.deepspeed.persistence",
    "stage3_max_live_parameters": "write options.deepspeed.live",
    "stage3_max_reuse_distance": "write options.deepspeed.reuse",
    "zero_hpz_partition_size mics_shard_size": "use backend: native with parallel.shard_over",
    "scheduler": _SCHEDULE,
    "steps_per_print": _LOG,
    "wall_clock_breakdown": "leave it out: `unipar compare` measures the parts of a step",
    "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale amp": _SCALER,
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": "leave it out: unipar sets it for your optimizer",
    "prescale_gradients gradient_predivide_factor communication_data_type": "leave it out: unipar scales the loss, and "
    "sums are exact in the gradients' precision",
    "autotp_size tensor_parallel": _TENSOR,
    "sequence_parallel_size ulysses_sequence_parallel_size": _ULYSSES,
    "csv_monitor tensorboard wandb comet": _TRACKERS,
    "dump_state": "use `unipar explain`",
}

_LIGHTNING: Mapping[str, str] = {
    "accelerator": _DEVICE,
    "devices gpus": _RANKS,
    "num_nodes": _MACHINES,
    "strategy": "write backend and parallel.shard, or use `--backend fsdp2`",
    "precision": _PRECISION,
    "max_epochs": _EPOCHS,
    "accumulate_grad_batches": _ACCUMULATE,
    "gradient_clip_val": _CLIP,
    "gradient_clip_algorithm": "leave it out: train.clip is a norm",
    "val_check_interval check_val_every_n_epoch": _EVALUATE,
    "limit_val_batches": _EVAL_BATCHES,
    "limit_train_batches fast_dev_run overfit_batches": "use --set train.steps=3",
    "log_every_n_steps": _LOG,
    "enable_checkpointing": "write checkpoint: {} to save, or leave the section out",
    "default_root_dir": _OUT,
    "logger loggers": _TRACKERS,
    "callbacks": "write eval.stop, checkpoint.best or train.ema; other code belongs to the task's train()",
    "deterministic benchmark": "leave it out: `unipar verify` states which kernels are deterministic",
    "detect_anomaly": "call torch.autograd.set_detect_anomaly(True) in your task's file",
    "use_distributed_sampler": "leave it out: unipar divides each batch among the ranks",
    "num_sanity_val_steps": "leave it out: the first evaluation is checked (eval.check)",
    "sync_batchnorm": "write model.sync_batchnorm: true",
    "profiler": _TRACE,
}

_FSDP: Mapping[str, str] = {
    "sharding_strategy fully_shard": _SHARD,
    "hybrid_shard device_mesh": _HYBRID,
    "mixed_precision_policy mp_policy": _PRECISION,
    "reshard_after_forward backward_prefetch forward_prefetch limit_all_gathers": _RESHARD,
    "cpu_offload offload_policy": _OFFLOAD,
    "auto_wrap_policy": _BLOCKS,
    "use_orig_params sync_module_states param_init_fn ignored_modules": "leave it out: unipar places the model",
    "find_unused_parameters": _UNUSED,
    "bucket_cap_mb": _BUCKETS,
    "static_graph": "write options.native.static_graph: true",
    "broadcast_buffers gradient_as_bucket_view": "leave it out: unipar sets it for DDP",
}

_MEGATRON: Mapping[str, str] = {
    "tensor_model_parallel_size": _TENSOR,
    "pipeline_model_parallel_size": _PIPELINE,
    "context_parallel_size": _CONTEXT,
    "data_parallel_size": _RANKS,
    "expert_model_parallel_size": _EXPERT,
    "sequence_parallel": _SEQUENCE,
    "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage": _PIPELINE_ORDER,
    "micro_batch_size": _MICRO,
    "global_batch_size": _TOTAL,
    "rampup_batch_size": "leave it out: the batch has one size in a run",
    "train_iters": _STEPS,
    "train_samples": "write train.steps (samples divided by batch.total)",
    "lr": _RATE,
    "min_lr": _MIN_RATE,
    "lr_decay_style": _SCHEDULE,
    "lr_warmup_iters lr_warmup_fraction lr_warmup_samples": _WARMUP,
    "lr_decay_iters lr_decay_samples": "leave it out: a schedule ends at the last step",
    "clip_grad": _CLIP,
    "recompute_granularity recompute_activations recompute_method recompute_num_layers": _RECOMPUTE,
    "use_distributed_optimizer": "write parallel.shard: optimizer",
    "save_interval": _SAVE,
    "eval_interval": _EVALUATE,
    "eval_iters": _EVAL_BATCHES,
    "log_interval": _LOG,
    "tensorboard_dir wandb_project": _TRACKERS,
    "load": _RESUME,
    "save": "write checkpoint: {every: 1000}",
    "seq_length seq_len hidden_size num_layers num_attention_heads": _OWN_CODE,
}

_TORCHTITAN: Mapping[str, str] = {
    "data_parallel_shard_degree data_parallel_replicate_degree": _HYBRID,
    "fsdp_reshard_after_forward": _RESHARD,
    "tensor_parallel_degree": _TENSOR,
    "pipeline_parallel_degree": _PIPELINE,
    "pipeline_parallel_schedule": _PIPELINE_ORDER,
    "context_parallel_degree": _CONTEXT,
    "expert_parallel_degree": _EXPERT,
    "local_batch_size": _MICRO,
    "global_batch_size": _TOTAL,
    "seq_len": _OWN_CODE,
    "max_norm": _CLIP,
    "mixed_precision_param mixed_precision_reduce": _PRECISION,
    "activation_checkpoint": _RECOMPUTE,
    "enable_async_tensor_parallel": "leave it out: unipar does not offer asynchronous tensor parallelism",
    "lr_scheduler": _SCHEDULE,
    "warmup_steps": _WARMUP,
    "decay_ratio decay_type": "write train.schedule: {name: wsd, decay: 100}",
    "min_lr_factor": _MIN_RATE,
    "enable_wandb enable_tensorboard": _TRACKERS,
    "dump_folder": _OUT,
    "keep_latest_k": _KEEP,
    "async_mode": _ASYNC,
    "ema_decay": _EMA,
    "comm init_timeout_seconds train_timeout_seconds": _TIMEOUT,
    "profiling enable_profiling profile_freq": _TRACE,
}

FOREIGN_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "Trainer": _TRAINER,
    "Accelerate": _LAUNCH_FILE,
    "DeepSpeed": _ZERO,
    "Lightning": _LIGHTNING,
    "FSDP and DDP": _FSDP,
    "Megatron": _MEGATRON,
    "torchtitan": _TORCHTITAN,
}
"""Keys of each library, those with the same answer in one text, and what to write instead."""

_ANSWERS: Final = {
    word: answer for table in FOREIGN_KEYS.values() for words, answer in table.items() for word in words.split()
}

FOREIGN_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "backend": {
        "torch pytorch distributed": "write backend: native",
        "fsdp fsdp1 hsdp": "write backend: native and parallel.shard: parameters",
        "deepspeed_stage_1 deepspeed_stage_2 deepspeed_stage_3": _STAGE,
        "megatron torchtitan tp": "write backend: native and parallel.tensor",
        "lightning fabric trainer transformers": "write native, deepspeed or accelerate: your loop is the task's",
    },
    "device": {"gpu": "write cuda", "tpu": "unipar does not train on TPUs; write auto"},
    "parallel.shard": {
        "full_shard full fsdp1 true": "write parameters (FSDP2)",
        "hybrid_shard hsdp": "write parameters, and parallel.shard_over: machine",
        "shard_grad_op _hybrid_shard_zero2": "write gradients",
        "no_shard none false": "write nothing (DDP)",
        "0 stage0": "write nothing (ZeRO stage 0)",
        "1 stage1 zero_1 zero-1": "write optimizer (ZeRO stage 1)",
        "2 stage2 zero_2 zero-2": "write gradients (ZeRO stage 2)",
        "3 stage3 zero_3 zero-3": "write parameters (ZeRO stage 3)",
    },
    "parallel.schedule": {
        "interleaved1f1b loopedbfs": "write interleaved",
        "interleavedzerobubble zbvzerobubble zbv dualpipev": "write zerobubble",
    },
    "model.recompute": {"full true all": "write blocks", "op": "write selective"},
    "train.precision": {
        "bf16 bfloat16 bf16-mix mixed": "write bf16-mixed (fp32 parameters, bf16 compute)",
        "bf16-true": "write bf16-master (bf16 parameters, fp32 masters)",
        "16 16-mixed float16 half fp16-mixed": "write fp16",
        "32 32-true float32 no": "write fp32",
        "64 64-true float64 double": "write fp64",
        "float8 tensorwise transformer-engine": "write fp8 (one scale for each tensor)",
        "rowwise": "write fp8-rowwise (one scale for each row)",
    },
    "train.optimizer.name": {
        "adamw_torch adamw_torch_fused fused_adamw adamw_hf fusedadam": "write adamw",
        "adamw_bnb_8bit adamw8bit adamw_8bit paged_adamw_8bit": "write adamw-8bit",
        "adafactor lion lamb shampoo soap schedule_free_adamw": "return it from the task's optimizer()",
    },
    "train.schedule.name": {
        "constant_with_warmup warmuplr": "write constant, with train.schedule.warmup",
        "warmupdecaylr linear_with_warmup": "write linear, with train.schedule.warmup",
        "warmupcosinelr cosine_with_warmup cosineannealinglr": "write cosine, with train.schedule.warmup",
        "onecyclelr": "write one-cycle",
        "multisteplr steplr": "write step",
        "inverse_sqrt": "write inverse-root",
        "warmup_stable_decay": "write wsd",
        "cosine_with_restarts reduce_lr_on_plateau": "return it from the task's schedule()",
    },
    "resume": {"true": "write auto", "false": "write never"},
}
"""Values of other libraries, by key, those with the same answer in one text."""

FOREIGN_STRATEGIES: Final[Mapping[str, str]] = {
    "fsdp fsdp1 full_shard": "write fsdp2",
    "hsdp hybrid_shard": "write fsdp2, and parallel.shard_over: machine",
    "deepspeed_stage_1 zero-1 zero_1 stage1": "write zero1",
    "deepspeed_stage_2 zero-2 zero_2 stage2 deepspeed_stage_2_offload": "write zero2",
    "deepspeed_stage_3 zero-3 zero_3 stage3 deepspeed_stage_3_offload": "write zero3",
    "ddp_find_unused_parameters_true ddp_spawn ddp_notebook distributed torch pytorch": "write ddp",
    "dp data_parallel": "write ddp",
    "tp tensor_parallel megatron torchtitan": "write ddp+tensor2 for 2 ranks that split each block's matrices",
    "pp pipeline": "write ddp+pipeline2 for 2 stages",
    "ep": "write ddp+expert2 for 2 ranks that have half of the experts each",
    "cp": "write ddp+context2 for 2 ranks that split each sequence",
    "auto": "write one name, or '*' for all (compare)",
}
"""Names of strategies in other libraries, those with the same answer in one text."""

_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "DeepSpeed": ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"),
    "Accelerate": ("compute_environment", "distributed_type", "fsdp_config"),
    "a Trainer": ("per_device_train_batch_size", "num_train_epochs", "micro_batch_size"),
}
"""Keys at the top of a file by which its library is known."""


def advise_on_key(word: str) -> str:
    """Return what to write in place of another library's key, or "" if the word is not known."""
    return _ANSWERS.get(_plain(word), "")


def advise_on_value(key: str, value: object) -> str:
    """Return what to write in place of another library's value of this key, or "" if it is not known."""
    return _answer(FOREIGN_VALUES.get(key, {}), str(value))


def advise_on_strategy(name: str) -> str:
    """Return what to write in place of another library's name of a strategy, or "" if it is not known."""
    return _answer(FOREIGN_STRATEGIES, name)


def library_of_file(data: Mapping[str, Any]) -> str:
    """Return the library whose config file has these keys at its top, or "" if it is not one of the known."""
    return next((library for library, marks in _FILES.items() if any(mark in data for mark in marks)), "")


def _answer(table: Mapping[str, str], word: str) -> str:
    return next((answer for words, answer in table.items() if word.lower() in words.split()), "")


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()
