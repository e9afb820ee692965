"""Import of the sections `bf16` and `fp16`."""

from __future__ import annotations

from typing import Any

from unipar.backend.foreign import AUTO, ForeignSection


def read_precision(keys: ForeignSection) -> None:
    """Carry the sections `bf16` and `fp16`."""
    reading = keys.reading
    chosen: list[str] = []
    open_answers = reading.answers
    autos = [name for name in ("bf16", "bfloat16", "fp16") if AUTO in _enabled(keys, name)]
    for name, meaning in (("bf16", "bf16-master"), ("bfloat16", "bf16-master"), ("fp16", "fp16")):
        if name not in keys:
            continue
        section = keys.below(name)
        if section.data.get("enabled") == AUTO and open_answers is not None:
            section.data["enabled"] = open_answers.precision == name.replace("bfloat16", "bf16")
        if section.open("enabled", "train.precision", meaning):
            section.leave_rest("it is about scaling the loss, or casting")
            continue
        if not section.take("enabled", bool, default=False):
            section.leave_rest(f"{name} is off")
            continue
        chosen.append(name)
        note = f"{name}.enabled"
        reading.put("train.precision", meaning, f"{note}: autocast over fp32" if meaning == "fp16" else note)
        scaling = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        section.omit(dict.fromkeys(scaling, "the loss is scaled by unipar's rule"))
        section.omit({"auto_cast": "unipar casts a batch's floating-point tensors"})
        mixed = "masters and moments are fp32 in unipar"
        section.refuse(dict.fromkeys((f"{name}_master_weights_and_grads", f"{name}_optimizer_states"), mixed))
        section.omit(dict.fromkeys(("opt_level", "fp16_scale_tolerance", "amp"), "DeepSpeed itself ignores it"))
        section.omit({"check_overflow": "unipar checks every loss", "consecutive_hysteresis": "it is about scaling"})
        section.refuse({"immediate_grad_update": "unipar reduces by its own rule"}, unless=(True, False))
        section.omit({"check_grad_overflow": "unipar checks every loss"})
        if not reading.strict:
            section.omit_unknown(("enabled", *scaling), "not known; it is about casting, or scaling the loss")
        section.end()
    if not chosen and open_answers is not None and "train.precision" not in reading.config:
        wanted = open_answers.precision
        if wanted:
            reading.put("train.precision", "bf16-master" if wanted == "bf16" else "fp16", open_answers.precision_why)
        elif autos:
            reading.assume_default("train.precision", "fp32", "bf16 and fp16 are off by default in the Trainer")
    if len(chosen) > 1:
        reading.wrong.append(f"{chosen[0]} and {chosen[1]} are both enabled; leave one of them")


def _enabled(keys: ForeignSection, name: str) -> tuple[Any, ...]:
    section: Any = keys.data.get(name)
    return (section.get("enabled"),) if isinstance(section, dict) else ()
