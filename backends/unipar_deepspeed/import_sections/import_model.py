"""Import of sections on the model: compilation, and matrices split over ranks."""

from __future__ import annotations

from typing import Any

from unipar.backend.foreign import ForeignConfigReader, ForeignSection


def read_compile(keys: ForeignSection) -> None:
    """Carry the section `compile`, which in DeepSpeed compiles the model as one."""
    if "compile" not in keys:
        return
    section = keys.below("compile")
    backend = section.take("backend", str, "inductor")
    off = section.take("disable", bool, default=False) or not section.take("enabled", bool, default=True)
    section.omit({"kwargs": "torch.compile uses its own choice", "deepcompile": "torch.compile alone is used"})
    section.end()
    if off:
        keys.reading.omit("compile", "it is off")
    elif backend == "inductor":
        keys.reading.put("model.compile", "model", "compile")
    else:
        keys.reading.put("model.compile", {"what": "model", "backend": backend}, "compile")


def read_tensor(keys: ForeignSection) -> None:
    """Carry the size of `tensor_parallel`: this many ranks train on the same samples."""
    section = keys.below("tensor_parallel")
    size = section.take("autotp_size", int, keys.take("autotp_size", int, 1)) or 1
    section.omit(
        dict.fromkeys(
            ("preset_model", "partition_config", "tp_overlap_comm", "keep_module_on_host", "injection_policy_tuple"),
            "unipar finds how matrices are split itself",
        )
    )
    section.end()
    reading = keys.reading
    if size > 1:
        reading.put("parallel.tensor", size, "tensor_parallel.autotp_size")
        _divide_ranks(reading, "tensor_parallel.autotp_size", size)


def read_experts(keys: ForeignSection) -> None:
    """Carry the size of `expert_parallel`: this many neighbours hold all experts together."""
    if "expert_parallel" not in keys:
        return
    section = keys.below("expert_parallel")
    on, size = section.take("enabled", bool, default=False), section.take("autoep_size", int, 1) or 1
    section.omit(dict.fromkeys(_AUTOEP_LAYOUT, "unipar finds the layers itself"))
    section.omit(dict.fromkeys(_AUTOEP_SPEED, "it is about speed"))
    section.omit({"load_balance_coeff": "routers are the model's own"})
    section.end()
    if on and size > 1:
        keys.reading.put("parallel.expert", size, "expert_parallel.autoep_size")


_AUTOEP_LAYOUT = (
    *("preset_model", "moe_layer_pattern", "router_pattern", "expert_pattern", "expert_w1", "expert_w2", "expert_w3"),
    *("num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern"),
)
_AUTOEP_SPEED = ("use_grouped_mm", "disable_triton_grouped_mm", "async_split_plan", "combine_impl", "gate_up_impl")


def read_sequence(keys: ForeignSection) -> None:
    """Carry `sequence_parallel_size`: DeepSpeed's Ulysses is a layer of the model, native's cuts any model."""
    size = keys.take("sequence_parallel_size", int, 1) or 1
    if size == 1:
        return
    reading = keys.reading
    reading.put("parallel.context", size, "sequence_parallel_size")
    _divide_ranks(reading, "sequence_parallel_size", size)
    reading.put("backend", "native", "sequences of any model")
    reading.drop_options()
    reading.put("options.native.attention", "ulysses", "sequence_parallel_size")
    reading.replace_master_weights("bf16", "sequence_parallel_size")


def _divide_ranks(reading: ForeignConfigReader, theirs: str, size: int) -> None:
    """Let this many ranks train on the same samples."""
    data: Any = reading.config.get("parallel.data")
    if reading.world and data == reading.world:
        if reading.world % size:
            reading.wrong.append(f"{theirs}: {size} does not divide {reading.world} ranks")
        reading.put("parallel.data", max(1, reading.world // size), f"{reading.world} ranks / {size}")
