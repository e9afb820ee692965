"""Faults of code for devices, each with a test on the emulated device that finds it: `make planted ARGS=emulated`."""

from __future__ import annotations

from typing import Final

from tests.corpus.planted_fault import Planted

DEVICE = "unipar/distributed/device.py"
BATCH = "unipar/engines/batch_transfer.py"
SAVING = "unipar/checkpoint/saving.py"
SEEDING = "unipar/utils/seeding.py"
RUNS = "unipar/verification/runs.py"
ONE = "tests/emulated/test_one_device.py"
BATCHES = "tests/emulated/test_batches.py"
COMMANDS = "tests/emulated/test_commands.py"
STRATEGIES = "tests/emulated/test_strategies.py"
NUMBERS = "tests/emulated/test_numbers.py"
NPU = "tests/emulated/test_other_accelerator.py"
RANDOM = "tests/emulated/test_random_numbers.py"
CHECKPOINTS = "tests/emulated/features/test_checkpoints.py"
OVERFLOWS = "tests/emulated/features/test_overflows.py"
DATA = "tests/emulated/features/test_data.py"
LIMITS = "tests/emulated/features/test_limits.py"
GROUPS = "tests/emulated/test_groups.py"
TRIAL = "unipar/launcher/micro_batch/trial_worker.py"

DEVICE_FAULTS: Final = (
    Planted(
        "Peaks of memory are never reset.",
        DEVICE,
        "        _module(device).reset_peak_memory_stats(device)",
        "        _module(device)",
        f"{ONE}::test_memory_of_a_device",
    ),
    Planted(
        "Peaks are reset on the current device, not on the one that is asked.",
        DEVICE,
        "reset_peak_memory_stats(device)",
        "reset_peak_memory_stats()",
        f"{ONE}::test_memory_of_a_device",
    ),
    Planted(
        "Bytes of tensors are those of the current device.",
        DEVICE,
        "_module(device).memory_allocated(device)",
        "_module(device).memory_allocated()",
        f"{ONE}::test_memory_of_a_device",
    ),
    Planted(
        "Memory that the allocator keeps for reuse does not count as available.",
        DEVICE,
        "free_and_total_bytes(device)[0] + bytes_reserved(device) - bytes_allocated(device)",
        "free_and_total_bytes(device)[0]",
        f"{ONE}::test_memory_of_a_device",
    ),
    Planted(
        "The limit of memory is set on the current device.",
        DEVICE,
        'share, *(() if device.type == "mps" else (device,))',
        "share",
        f"{ONE}::test_a_share_of_the_memory",
    ),
    Planted(
        "Unused memory is kept.",
        DEVICE,
        "_module(device).empty_cache()",
        "_module(device)",
        f"{ONE}::test_memory_that_is_kept_for_reuse",
    ),
    Planted(
        "The state of random numbers is that of another device.",
        DEVICE,
        "_module(device).get_rng_state(device)",
        "_module(device).get_rng_state()",
        f"{ONE}::test_random_numbers_of_a_device",
    ),
    Planted(
        "The state of random numbers goes back to another device.",
        DEVICE,
        "_module(device).set_rng_state(state.cpu(), device)",
        "_module(device).set_rng_state(state.cpu())",
        f"{ONE}::test_random_numbers_of_a_device",
    ),
    Planted(
        "Nothing is waited for.",
        DEVICE,
        "        _module(device).synchronize(device)",
        "        _module(device)",
        f"{ONE}::test_waiting_for_a_device",
    ),
    Planted(
        "The current device is waited for, not the one that is asked.",
        DEVICE,
        "        _module(device).synchronize(device)",
        "        _module(device).synchronize()",
        f"{ONE}::test_waiting_for_a_device",
    ),
    Planted(
        "A rank that sees one device counts devices as if it saw all.",
        DEVICE,
        "int(index) if index else 0 if count == 1 else local_rank",
        "int(index) if index else local_rank",
        f"{ONE}::test_the_device_of_a_rank",
    ),
    Planted(
        "All ranks of a machine take its first device.",
        DEVICE,
        "0 if count == 1 else local_rank",
        "0",
        f"{ONE}::test_the_device_of_a_rank",
    ),
    Planted(
        "The device of a rank is not its current one.",
        DEVICE,
        "        module.set_device(device)\n",
        "",
        f"{ONE}::test_the_device_of_a_rank",
    ),
    Planted(
        "All devices have the identifier of the first.",
        DEVICE,
        "_module(device).get_device_properties(device)",
        "_module(device).get_device_properties(0)",
        f"{ONE}::test_names_of_devices",
    ),
    Planted(
        "The account looks for the default stream, whatever the current one is.",
        DEVICE,
        "_module(device).current_stream(device)",
        "_module(device).default_stream(device)",
        f"{ONE}::test_an_accounts_stream",
    ),
    Planted(
        "A step does not wait for the copy of its batch.",
        BATCH,
        "    computing.wait_stream(copying)\n",
        "",
        f"{BATCHES}::test_nobody_waits_for_a_batch",
    ),
    Planted(
        "The memory of a batch is handed out again while the step reads it.",
        BATCH,
        "    moved.record_stream(computing)\n",
        "",
        f"{BATCHES}::test_memory_of_a_batch_is_not_taken_while_the_step_reads_it",
    ),
    Planted(
        "A batch is copied from memory that is not pinned.",
        BATCH,
        "t.pin_memory().to(device, non_blocking=True)",
        "t.to(device, non_blocking=True)",
        f"{BATCHES}::test_nobody_waits_for_a_batch",
    ),
    Planted(
        "The host waits for the copy of each batch.",
        BATCH,
        "t.pin_memory().to(device, non_blocking=True)",
        "t.pin_memory().to(device)",
        f"{BATCHES}::test_nobody_waits_for_a_batch",
    ),
    Planted(
        "Batches are copied on the stream that computes.",
        BATCH,
        "    with copying:\n",
        "    with computing:\n",
        f"{BATCHES}::test_a_copy_does_not_wait_for_the_step_before",
    ),
    Planted(
        "A snapshot is written before the device has copied it.",
        SAVING,
        "        self._world.synchronize()  # copies are asynchronous\n",
        "",
        f"{CHECKPOINTS}::test_an_asynchronous_checkpoint_has_the_same_bytes[nothing-2]",
    ),
    Planted(
        "A snapshot is copied to memory that is not pinned.",
        SAVING,
        "pinned = has_own_memory(t.device)",
        "pinned = False",
        f"{ONE}::test_a_snapshot_is_pinned",
    ),
    Planted(
        "A step seeds the CPU's generator only.",
        SEEDING,
        "        module.manual_seed(seed)",
        "        module.initial_seed()",
        f"{ONE}::test_seeds_of_a_device",
    ),
    Planted(
        "A trial changes the device's random numbers.",
        SEEDING,
        "devices.append(module.current_device())",
        "devices.clear()",
        f"{RANDOM}::test_a_trial_leaves_random_numbers_as_they_were",
    ),
    Planted(
        "A trial starts a device that the process does not use.",
        SEEDING,
        'if module is not None and getattr(module, "is_initialized", lambda: False)():',
        "if module is not None:",
        f"{RANDOM}::test_a_trial_does_not_start_cuda",
    ),
    Planted(
        "Buffers are left on the CPU.",
        "unipar/engines/placement.py",
        "direct_buffers(module) | plain_attributes(module)",
        "plain_attributes(module)",
        f"{ONE}::test_all_tensors_of_a_model_are_placed",
    ),
    Planted(
        "An overflow on the device is taken for a good step.",
        "unipar/engines/loss_scale.py",
        "skipped = norm.isfinite().logical_not_()",
        "skipped = norm.isnan()",
        f"{ONE}::test_fp16s_gradients",
    ),
    Planted(
        "Every step in fp16 waits for its overflow.",
        "unipar/engines/update_guard.py",
        "if self._has_updated and self._optimizer_reads:",
        "if not left_out.item() and self._has_updated and self._optimizer_reads:",
        f"{OVERFLOWS}::test_skipped_steps_between_two_logged_ones[native/nothing-more0-waits0]",
    ),
    Planted(
        "The schedule does not wait for steps that the device has skipped.",
        "unipar/engines/learning_rate.py",
        "step - self._first - skipped)",
        "step - self._first - skipped * 0)",
        f"{OVERFLOWS}::test_skipped_steps_between_two_logged_ones[native/nothing-more0-waits0]",
    ),
    Planted(
        "Weights of batches are added up on the device.",
        "unipar/distributed/world.py",
        '        if self.device.type == "cpu" or self.size == 1:\n            return self.sum_over_data(tensor)\n',
        "        if True:\n            return self.sum_over_data(tensor.to(self.device))\n",
        f"{DATA}::test_no_wait_for_what_ranks_have_read[WeighedGPT-more0]",
    ),
    Planted(
        "The host waits for a batch that moves itself.",
        BATCH,
        "    return batch.to(device, non_blocking=True)\n",
        "    return batch.to(device)\n",
        f"{BATCHES}::test_a_batch_that_moves_itself",
    ),
    Planted(
        "The process group is not told its device.",
        "unipar/backend/joining.py",
        'device_id=device if kind != "gloo" else None',
        "device_id=None",
        f"{GROUPS}::test_a_group_is_told_its_device",
    ),
    Planted(
        "A trial of a microbatch has no limit of memory.",
        TRIAL,
        "        limit_memory(device, ",
        "        max(device.index, ",
        f"{LIMITS}::test_a_trial_keeps_its_limit",
    ),
    Planted(
        "A trial of a microbatch has the peak of what was before it.",
        TRIAL,
        "        forget_peaks(device)\n",
        "        pass\n",
        f"{LIMITS}::test_a_trial_keeps_its_limit",
    ),
    Planted(
        "Every microbatch waits for its loss.",
        "unipar/engines/gradients.py",
        "no_copy = scale == 1.0 and loss.is_cpu",
        "no_copy = loss.item() < 0 and scale == 1.0",
        f"{STRATEGIES}::test_trains_as_on_the_cpu[native/nothing]",
    ),
    Planted(
        "Offloaded shards are made on the device.",
        "backends/unipar_native/fsdp2.py",
        'home = torch.device("cpu") if "offload_policy" in settings else device',
        "home = device",
        f"{COMMANDS}::test_parameters_offloaded_to_the_host",
    ),
    Planted(
        "Two ranks on one device meet.",
        "unipar/backend/joining.py",
        "        _check_own_devices(world)\n",
        "        pass\n",
        f"{COMMANDS}::test_two_ranks_see_the_same_device",
    ),
    Planted(
        "Worlds of a verification on a device are forks.",
        "unipar/verification/world_pool.py",
        'if device != "cpu":  # CUDA',
        "if False:  # CUDA",
        "tests/verification/test_world_pool.py::test_nothing_is_forked_for_a_device",
    ),
    Planted(
        "Ranks on a device are forks.",
        "unipar/launcher/processes/starters.py",
        'return config.launch.fork and device == "cpu"',
        "return config.launch.fork",
        "tests/launcher/processes/test_starters.py::test_where_workers_are_forks[cuda-launch1-False]",
    ),
    Planted(
        "A verification leaves TF32 on.",
        "unipar/verification/worker/determinism.py",
        'torch.set_float32_matmul_precision("highest")',
        "pass",
        f"{NUMBERS}::test_what_verify_sets",
    ),
    Planted(
        "A verification is content with kernels that only warn.",
        "unipar/verification/worker/determinism.py",
        "warn_only=not strict",
        "warn_only=True",
        f"{NUMBERS}::test_what_verify_sets",
    ),
    Planted(
        "A verification leaves cuBLAS the workspace that it likes.",
        "unipar/verification/world_pool.py",
        "**({} if self.numbers is None else self.numbers.variables()),",
        "",
        f"{NUMBERS}::test_what_verify_sets",
    ),
    Planted(
        "What is allowed does not know that no run repeats another.",
        RUNS,
        'return [RunKey("one process", repeat=n + 1) for n in range(REPEATS)]',
        "return []",
        f"{NUMBERS}::test_an_operation_without_a_deterministic_kernel",
    ),
    Planted(
        "Ranks share a device whose tensors gloo does not move.",
        "unipar/backend/resources.py",
        "if wanted > 1 and not ACCELERATORS[kind].can_be_shared:",
        "if False:",
        f"{NPU}::test_the_number_of_devices",
    ),
    Planted(
        "Memory of an accelerator that is not CUDA is looked for in NVML.",
        "unipar/memory/sources/allocator_history.py",
        'if self.device != "cuda":',
        "if False:",
        f"{NPU}::test_account_of_the_memory",
    ),
    Planted(
        "A phase of the account has the peak of the phases before it.",
        "unipar/memory/sources/allocator_history.py",
        "        self._torch.reset_peak_memory_stats(self._index)\n        self._take_snapshot()\n",
        "        self._take_snapshot()\n",
        f"{NPU}::test_account_of_the_memory",
    ),
)
