"""Import of the section `optimizer` of a ds_config.json."""

from __future__ import annotations

from collections.abc import Mapping

from unipar.backend.foreign import ForeignSection


def read_optimizer(keys: ForeignSection) -> None:
    """Carry the section `optimizer`."""
    reading = keys.reading
    if "optimizer" not in keys:
        reading.ask_optimizer("optimizer, which your script makes")
        return
    section = keys.below("optimizer")
    kind = section.take("type", str, "")
    name = kind.lower()
    if name not in ("adam", "adamw", "sgd", "rmsprop", "muon"):
        section.leave_rest("its type is refused")
        why = f"{kind or 'nothing'} is not among sgd, adam, adamw, rmsprop and muon"
        reading.refuse("optimizer.type", why, "train.optimizer")
        return
    section.omit({"legacy_fusion": "it is about speed"})
    params = section.below("params")
    section.end()
    if name == "muon":
        _read_muon(params)
        return
    torch_adam = params.take("torch_adam", bool, default=False)
    note = ""
    if name == "adam" and params.take("adam_w_mode", bool, default=True):
        name, note = "adamw", "DeepSpeed's Adam is AdamW unless adam_w_mode is false"
    if "adam_w_mode" in params:
        params.take("adam_w_mode", bool, default=True)
    reading.put("train.optimizer.name", name, note)
    _read_optimizer_params(params, name, torch_adam=torch_adam)


_OWN_PARAMS: Mapping[str, Mapping[str, float | bool]] = {
    "sgd": {"momentum": 0.0, "nesterov": False},
    "rmsprop": {"alpha": 0.99, "momentum": 0.0, "centered": False},
}
"""Parameters that an optimizer has in unipar by the same name, each with its default in DeepSpeed."""


def _read_optimizer_params(params: ForeignSection, name: str, *, torch_adam: bool) -> None:
    reading = params.reading
    params.carry("lr", "train.optimizer.lr", 1e-2 if name == "rmsprop" else 1e-3, example="3.0e-4")
    decay = 0.01 if name == "adamw" and torch_adam else 0.0
    note = "torch.optim.AdamW's default" if "weight_decay" not in params and decay else ""
    params.carry("weight_decay", "train.optimizer.weight_decay", decay, example="0.01", note=note)
    for key, default in _OWN_PARAMS.get(name, {}).items():
        params.carry(key, f"train.optimizer.{key}", default)
    if name in ("adam", "adamw") and not params.open("betas", "train.optimizer.betas", "'[0.9, 0.999]'"):
        reading.put("train.optimizer.betas", [float(b) for b in params.take("betas", list, [0.9, 0.999])])
    if name != "sgd":
        params.carry("eps", "train.optimizer.eps", 1e-8, example="1.0e-8")
    for kernel in ("foreach",) if name == "rmsprop" else ("fused", "foreach"):
        if kernel in params:
            params.carry(kernel, f"train.optimizer.{kernel}", default=False)
    params.expect("bias_correction", True, "unipar's Adam always corrects the bias")
    params.expect("amsgrad", False, "unipar's Adam has no AMSGrad")
    params.expect("dampening", 0, "unipar's SGD has no dampening")
    params.expect("maximize", False, "unipar minimizes")
    params.end(("betas", "eps", "fused", *(key for own in _OWN_PARAMS.values() for key in own)))


def _read_muon(params: ForeignSection) -> None:
    """Carry DeepSpeed's Muon, and the settings of Adam beside it."""
    reading = params.reading
    reading.put("train.optimizer.name", "muon")
    reading.put("train.optimizer.adjust_lr", "original", "DeepSpeed's factor of the rate")
    if params.open("lr", "train.optimizer.lr", "0.02"):
        rate = reading.overrides.get("train.optimizer.lr", reading.config.get("train.optimizer.lr"))
    else:
        rate = params.take("lr", float, 0.0)
    for theirs, ours, default in (("muon_lr", "lr", 0.02), ("adam_lr", "adamw.lr", 3e-4)):
        own = params.take(theirs, float, 0.0) or rate
        note = "" if own else "DeepSpeed's own default, where the file says nothing"
        reading.put(f"train.optimizer.{ours}", own or default, note)
    params.carry("weight_decay", "train.optimizer.weight_decay", 0.0, example="0.01")
    params.carry("momentum", "train.optimizer.momentum", 0.95)
    if not params.open("betas", "train.optimizer.adamw.betas", "'[0.9, 0.95]'"):
        betas = [float(b) for b in params.take("betas", list, [0.9, 0.95])]
        reading.put("train.optimizer.adamw.betas", betas)
    params.carry("eps", "train.optimizer.adamw.eps", 1e-10, example="1.0e-10")
    method = params.take("ns_method", str, "gram")
    if method == "standard":
        reading.put("train.optimizer.ns_precision", "bf16", "ns_method: standard")
    elif not reading.assume_default("train.optimizer.ns_precision", "full", "DeepSpeed's gram runs in fp16"):
        reading.refuse("optimizer.params.ns_method", f"{method} runs in fp16", "train.optimizer.ns_precision")
    why = "auto: all but those of embeddings and of the last module, not all without embed or lm_head in their name"
    if not reading.assume_default("train.optimizer.matrices", "auto", why.removeprefix("auto: ")):
        reading.refuse("optimizer.type", f"Muon's matrices go by name there; {why}", "train.optimizer.matrices")
    params.expect("per_head_muon", False, "unipar's Muon takes each matrix as a whole")
    params.expect("adam_w_mode", True, "Muon's Adam is AdamW")
    params.expect("torch_adam", True, "it is about speed")
    params.end()
