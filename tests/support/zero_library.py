"""DeepSpeed's own engine on one rank of any world, in a process group that only pretends, beside what is planned."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from tests.support import zero_shapes
from tests.support.pretended_disk import bytes_in_files, lowered_limits, settings_of_limits
from unipar.backend import Holding, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import Config, Strategy
from unipar.config.config_source import load_given_config
from unipar.distributed.place import Place
from unipar.errors import Unsupported
from unipar.prediction.timeline import StepTimeline


@dataclass(frozen=True)
class Case:
    """One model on one number of ranks."""

    seed: int
    strategy: str
    ranks: int
    precision: str = "fp32"
    microbatches: int = 1
    decay: str = "all"
    options: dict[str, Any] | None = None
    limits: dict[str, int] | None = None
    """DeepSpeed's limits of what goes to the disk, lowered for small models."""

    @property
    def disk(self) -> Path | None:
        """Folder to which it offloads."""
        folder = (self.options or {}).get("offload_to")
        return None if folder is None else Path(folder)

    @property
    def config(self) -> Config:
        """Config of the case."""
        given: dict[str, Any] = {
            "task": {"use": f"{zero_shapes.__file__}:Shapes", "args": {"seed": self.seed}},
            "device": "cpu",
            "parallel": {"data": self.ranks},
            "batch": {"total": self.ranks * self.microbatches, "micro": 1},
            "model": {"blocks": "none"},
            "train": {"steps": 3, "precision": self.precision, "optimizer": {"decay": self.decay}},
            "options": {"deepspeed": self.options or {}},
        }
        return strategies.config_in_strategy(load_given_config(given).config, Strategy.parse(self.strategy))


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Write what each case in cases.json holds and sends, beside what is planned, into compared.json."""
    warnings.filterwarnings("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text("utf-8"))]
    compared = [_compare(case) for case in cases]
    (folder / "compared.json").write_text(json.dumps(compared), "utf-8")


def _compare(case: Case) -> dict[str, Any]:
    if case.disk is None:
        planned, rank = _planned(case)
        return {"planned": planned, "found": _trained(case, rank)}
    with lowered_limits(case.limits or {}):
        return {"planned": _planned_or_not(case), "found": _trained_or_not(case)}


FAILS: dict[str, Any] = {"fails": "for lack of swap buffers"}


def _planned_or_not(case: Case) -> dict[str, Any]:
    try:
        return _planned(case)[0]
    except Unsupported:
        return FAILS


def _trained_or_not(case: Case) -> dict[str, Any]:
    from unipar_deepspeed.engine import reset_deepspeed

    try:
        return _trained(case, 0)
    except AssertionError as e:
        if "already assigned swap buffer" not in str(e) and "Not enough buffers" not in str(e):
            raise
        reset_deepspeed()
        return FAILS


def _planned(case: Case) -> tuple[dict[str, Any], int]:
    """Return what is planned, and the number of the rank for which it is."""
    from unipar_deepspeed.predict import zero_model
    from unipar_deepspeed.prediction.flat import FlatModel

    timeline = replace(_traced(case.seed, case.precision, case.decay), microbatches=case.microbatches)
    offloaded = "offload_optimizer" in (case.options or {})  # on CUDA to memory that is pinned
    device = "cpu" if offloaded or case.disk else "cuda"
    prediction = registry.find_backend("deepspeed").predict(case.config, timeline, case.ranks, device=device)
    sums: dict[str, Counter[str]] = {}
    for phase in ("update", "steady"):
        at = timeline.at(phase)
        there = [t for t in prediction.at("device") if t.first <= at and (t.until is None or t.until > at)]
        sums[phase] = Counter()
        for term in there:
            copied = term.name.endswith(" in fp32") and not offloaded  # of a gradient, which the update makes later
            left_out = copied or term.category == "temporaries" or term.name.endswith(", staged")
            sums[phase][term.category] += 0 if left_out else term.size
    if case.disk is not None:
        sums["disk"] = Counter()
        for term in prediction.at("disk"):
            sums["disk"][term.category] += term.size
    sent = {volume.collective: [volume.size, volume.calls] for volume in prediction.sent}
    flat = FlatModel.of(zero_model(case.config, timeline, case.ranks, device="cuda"))
    alike = case.config.parallel.shard in ("nothing", "parameters")
    return {phase: _nonzero(found) for phase, found in sums.items()} | {"sent": sent}, 0 if alike else flat.rank


@cache
def _traced(seed: int, precision: str, decay: str) -> StepTimeline:
    from unipar.training.fake_run.trace_task import trace_task

    return trace_task(Case(seed, "deepspeed/nothing", 1, precision, decay=decay).config, 1).timeline


def _trained(case: Case, rank: int) -> dict[str, Any]:
    """Return what DeepSpeed holds before and after the update of a steady step, and what the step sends."""
    import deepspeed
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from unipar_deepspeed.engine import reset_deepspeed

    from unipar.engines.forward import ForwardCall, OpaqueBatch

    os.environ.update(WORLD_SIZE=str(case.ranks), RANK=str(rank), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("fake", rank=rank, world_size=case.ranks, store=FakeStore())
    deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)
    task = zero_shapes.Shapes(case.seed)
    torch.manual_seed(0)
    model = task.model()
    parameters = sum(p.numel() for p in model.parameters())
    settings = registry.find_backend("deepspeed").native_config(case.config, parameters)
    settings["train_batch_size"] = case.ranks
    if case.disk is not None:
        settings = settings_of_limits(settings, case.limits or {})
    low = torch.bfloat16 if case.precision == "bf16-master" else torch.float32
    model.to(low)
    if settings["zero_optimization"]["stage"] == 3:
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    thin = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) < 2]
    if case.decay == "all" or not thin:
        groups = [{"params": trained}]
    else:
        groups = [{"params": [p for p in trained if all(p is not q for q in thin)]}, {"params": thin}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    call = ForwardCall(model, torch.device("cpu"))
    engine = deepspeed.initialize(model=call, optimizer=optimizer, config=settings, dist_init_required=False)[0]
    batch = (torch.arange(5).view(1, 5) % task.words,)
    found: dict[str, Any] = {}
    for _ in range(4):  # in the first ones DeepSpeed learns the order of modules
        with _Pretended() as pretended:
            for micro in range(1, case.microbatches + 1):
                engine.set_gradient_accumulation_boundary(micro == case.microbatches)
                loss = engine(task.loss, OpaqueBatch(batch))
                engine.backward(loss)
            found["update"] = _held(model, engine)
            engine.step()
        found |= {"steady": _held(model, engine), "sent": pretended.sent if case.ranks > 1 else {}}
    if case.disk is not None:
        found["disk"] = bytes_in_files(case.disk, rank)
    assert not getattr(engine.optimizer, "overflow", False)
    engine.destroy()
    reset_deepspeed()
    return found


@final
class _Pretended(TorchDispatchMode):
    """Counts bytes and calls of collectives; gathered values are zero, where nothing has come."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from unipar.memory.recording.bytes_sent_recorder import collective_of

        kind = collective_of(func._schema.name)
        if func._schema.name == "c10d::_allgather_base_":
            args[0].zero_()
        out = func(*args, **(kwargs or {}))
        if kind is not None:
            counted = self.sent.setdefault(kind, [0, 0])
            counted[0] += max(_bytes(part) for part in (*args[:2], out))
            counted[1] += 1
        return out


def _bytes(part: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor))


def _held(model: Any, engine: Any) -> dict[str, int]:
    """Return the bytes that are held, by category, without the optimizer's counts of steps."""
    from unipar.memory.recording.held_bytes import find_storages

    storages: dict[int, tuple[str, int]] = {}
    left_out = {t.untyped_storage().data_ptr() for t in _placeholders(model, engine)}
    for holding in _holdings(model, engine):
        for storage in find_storages(holding.tensor):
            if storage.nbytes() and storage.data_ptr() not in left_out and not holding.name.startswith("step["):
                storages.setdefault(storage.data_ptr(), (holding.category, storage.nbytes()))
    sums: Counter[str] = Counter()
    for category, size in storages.values():
        sums[category] += size
    return _nonzero(sums)


def _placeholders(model: Any, engine: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of one number that stand for what is on the disk."""
    yield from (t for t in getattr(engine.optimizer, "param_groups_fp16_flat_cpu_memory", ()) if t.numel() == 1)
    yield from (p.nvme_swapper.invalid_buffer for p in model.parameters() if getattr(p, "nvme_swapper", None))


def _holdings(model: Any, engine: Any) -> Iterator[Holding]:
    from unipar_deepspeed.zero_holdings import zero_holdings

    from unipar.engines.state import module_holdings

    yield from zero_holdings(model, engine)
    yield from module_holdings(model)


def _nonzero(sums: Counter[str]) -> dict[str, int]:
    return {category: size for category, size in sums.items() if size}
