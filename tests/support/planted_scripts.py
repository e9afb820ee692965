"""Faults of training scripts that give no error, and healthy scripts that look like them, as edits of a few scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tests.support.observed_world import Variant
from unipar.backend.observed_library import TrainingFault


@dataclass(frozen=True)
class PlantedFault:
    """A script with a fault, and what is said about it."""

    variant: Variant
    kind: TrainingFault
    step: int | None
    parameter: str = ""
    ranks: tuple[int, ...] = ()
    way_out: str = ""
    """Part of the way out, in the words of the library that the script uses."""

    says: str = ""
    """Part of the sentence on what was seen."""

    note: bool = False
    """Whether many scripts do it on purpose."""

    codes: tuple[int, int] = (0, 0)
    """Exit codes of the ranks."""

    sweep: bool = False
    """Whether another one like it is always planted, and this one in the sweeps alone."""


def _plain(edits: Mapping[str, str]) -> Variant:
    return Variant("plain.py", edits)


def _after_step(code: str) -> dict[str, str]:
    """Return the edit that adds a line after the optimizer's step; `done` is 0 in the first one."""
    return {"        schedule.step()\n": f"        schedule.step()\n        {code}\n"}


def _accumulating(edits: Mapping[str, str]) -> Variant:
    return Variant("accumulating.py", edits)


def _accelerate(edits: Mapping[str, str]) -> Variant:
    return Variant("with_accelerate.py", edits)


def _fabric(edits: Mapping[str, str]) -> Variant:
    return Variant("with_fabric.py", edits)


def _deepspeed(edits: Mapping[str, str]) -> Variant:
    return Variant("with_deepspeed.py", edits)


def _sharded(edits: Mapping[str, str]) -> Variant:
    return Variant("sharded.py", edits)


def _adversarial(edits: Mapping[str, str]) -> Variant:
    return Variant("adversarial.py", edits)


WRAPPER = "DistributedDataParallel(model)"
BF16 = {"nn.Linear(16, 4))\n": "nn.Linear(16, 4)).bfloat16()\n", "(ddp(x), y)": "(ddp(x.bfloat16()), y)"}
ALONE = {
    'dist.init_process_group("gloo")\n': "import os\n",
    "dist.get_rank()": 'int(os.environ["RANK"])',
    WRAPPER: "model",
    "DistributedSampler(samples)": "DistributedSampler(samples, 2, rank)",
    "dist.destroy_process_group()\n": "",
}
SHARD = "fully_shard(model, mesh=mesh)"
PREPARED = "accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))"

FAULTS: Final[Mapping[str, PlantedFault]] = {
    "unequal initial weights": PlantedFault(
        _plain({WRAPPER: "model", "torch.manual_seed(1)": "torch.manual_seed(rank)"}),
        "unequal initial weights",
        1,
        "0.weight",
        (1,),
        "let DistributedDataParallel broadcast rank 0's weights",
    ),
    "missing wrapper": PlantedFault(
        _plain({WRAPPER: "model"}),
        "unreduced gradients",
        2,
        "0.weight",
        way_out="wrap the model in DistributedDataParallel",
        says="unequal gradients for 6 of 6 weights",
    ),
    "no_sync left on": PlantedFault(
        _accumulating({"ddp.no_sync() if micro < micros - 1 else nullcontext()": "ddp.no_sync()"}),
        "unreduced gradients",
        2,
        "0.weight",
        way_out="leave no_sync in the last microbatch",
    ),
    "the module instead of the wrapper": PlantedFault(
        _plain({"(ddp(x), y)": "(ddp.module(x), y)"}),
        "unreduced gradients",
        2,
        "0.weight",
        way_out="call it through the wrapper and not through its module",
        sweep=True,
    ),
    "one weight changed": PlantedFault(
        _plain(_after_step("if done == 4 and rank == 1: model[0].weight.data[0, 0] += 1e-6")),
        "unequal copies",
        8,
        "0.weight",
        (1,),
        "change no weight on one rank alone",
        "after step 8 1 of 6 weights differ",
    ),
    "one optimizer state changed": PlantedFault(
        _plain(_after_step('if done == 7 and rank == 1: optimizer.state[model[3].bias]["exp_avg"].mul_(1.001)')),
        "unequal copies",
        8,
        "exp_avg of 3.bias",
        (1,),
        says="1 of 18 optimizer states differ",
    ),
    "one buffer changed": PlantedFault(
        _plain(
            {
                "nn.LayerNorm(16)": "nn.BatchNorm1d(16).eval()",
                WRAPPER: "DistributedDataParallel(model, broadcast_buffers=False)",
            }
            | _after_step("if done == 4 and rank == 1: model[1].running_mean[0] += 1")
        ),
        "unequal copies",
        8,
        "1.running_mean",
        (1,),
        says="1 of 3 buffers differ",
    ),
    "a buffer beside batch norms": PlantedFault(
        _plain(
            {
                "nn.LayerNorm(16)": "nn.BatchNorm1d(16)",
                WRAPPER: 'DistributedDataParallel(model, broadcast_buffers=False); model.register_buffer("seen", '
                "torch.zeros(1))",
            }
            | _after_step("if done == 4 and rank == 1: model.seen += 1")
        ),
        "unequal copies",
        8,
        "seen",
        (1,),
        sweep=True,
    ),
    "unequal microbatches": PlantedFault(
        _accumulating({"micros = 2": "micros = 2 + rank"}),
        "unequal microbatches",
        1,
        ranks=(1,),
        way_out="DistributedSampler(drop_last=True)",
        says="2 and 3 backwards in one step",
    ),
    "fewer steps on one rank": PlantedFault(
        _plain(_after_step("if done == 8 and rank == 1: break")),
        "unequal microbatches",
        10,
        ranks=(1,),
        says="the ranks began 10 and 9 steps",
        codes=(1, 0),
    ),
    "an update without effect": PlantedFault(
        _plain(BF16 | {"lr=1e-2": "lr=1e-7"}),
        "update without effect",
        2,
        "0.weight",
        (0,),
        "keep the weights in fp32",
    ),
    "the optimizer of an old copy": PlantedFault(
        _plain(
            {
                "optimizer = torch.optim.AdamW(ddp.parameters()": "from copy import deepcopy\n"
                "optimizer = torch.optim.AdamW(deepcopy(model).parameters()"
            }
        ),
        "weights outside the optimizer",
        2,
        "0.weight",
        (0,),
        "make the optimizer after the model has its final parameters",
        "the optimizer has 6 tensors that no model has",
    ),
    "weights left out of the optimizer": PlantedFault(
        _plain({"AdamW(ddp.parameters()": "AdamW(model[:3].parameters()"}),
        "weights outside the optimizer",
        2,
        "3.weight",
        (0,),
        says="3.weight, 3.bias got gradients and no optimizer has them",
    ),
    "coarse weights": PlantedFault(
        _plain(BF16), "coarse dtype", 2, "0.weight", (0,), "compute under torch.autocast", note=True
    ),
    "coarse optimizer states": PlantedFault(
        _plain(
            _after_step(
                "if done == 1: optimizer.state[model[0].weight]['max_exp_avg_sq'] = torch.ones(16, 8).bfloat16()"
            )
        ),
        "coarse dtype",
        2,
        "0.weight",
        (0,),
        says="keeps its max_exp_avg_sq in bfloat16",
        note=True,
        sweep=True,
    ),
    "a schedule stepped once a process": PlantedFault(
        _accelerate({"step_scheduler_with_optimizer=False": "step_scheduler_with_optimizer=True"}),
        "schedule too fast",
        1,
        ranks=(0,),
        way_out="Accelerator(step_scheduler_with_optimizer=False)",
        note=True,
    ),
    "no sampler for ranks": PlantedFault(
        _plain({"sampler=sampler": "shuffle=False"}),
        "same batches",
        1,
        way_out="give the DataLoader a DistributedSampler",
        says="gave all ranks the same first batches",
    ),
    "same samples without a loader": PlantedFault(
        _accumulating({"torch.manual_seed(rank)": "torch.manual_seed(2)"}),
        "same batches",
        1,
        way_out="seed each rank's data by its rank",
        says="all ranks had the same losses",
    ),
    "no set_epoch": PlantedFault(
        _plain({"sampler.set_epoch(epoch)": "pass"}),
        "repeated order",
        9,
        ranks=(0,),
        way_out="set_epoch(epoch)",
    ),
    "same dropout": PlantedFault(
        _plain({"nn.ReLU()": "nn.Dropout(0.1)", "torch.manual_seed(rank)\n": ""}),
        "same dropout",
        2,
        way_out="torch.manual_seed(seed + rank)",
        note=True,
    ),
    "an unsynced batch norm": PlantedFault(
        _plain({"nn.LayerNorm(16)": "nn.BatchNorm1d(16)"}),
        "unsynced batch norm",
        None,
        "1",
        way_out="convert_sync_batchnorm",
        note=True,
    ),
    "no process group": PlantedFault(
        _plain(ALONE),
        "no group",
        None,
        way_out="call torch.distributed.init_process_group",
        says="the launcher started 2 processes, and 2 of them trained alone",
    ),
    "Accelerate, a model that was not prepared": PlantedFault(
        _accelerate(
            {f"model, optimizer = {PREPARED}": f"model, optimizer = bare, {PREPARED.replace('(bare, ', '(', 1)}"}
        ),
        "unreduced gradients",
        2,
        "0.weight",
        way_out="pass the model through accelerator.prepare",
    ),
    "Accelerate, a loader that was not prepared": PlantedFault(
        _accelerate({"accelerator.prepare(DataLoader(samples, batch_size=4, shuffle=True))": "DataLoader(samples, 4)"}),
        "same batches",
        1,
        way_out="pass the DataLoader through accelerator.prepare",
        note=True,
        sweep=True,
    ),
    "Fabric, never synchronized": PlantedFault(
        _fabric({"enabled=i % 2 == 0": "enabled=True"}),
        "unreduced gradients",
        2,
        "0.weight",
        way_out="fabric.no_backward_sync in all microbatches but the last",
    ),
    "DeepSpeed, same batches": PlantedFault(
        _deepspeed({"sampler=DistributedSampler(samples)": "shuffle=False"}),
        "same batches",
        1,
        way_out="give deepspeed.initialize the training_data",
    ),
    "DeepSpeed, one weight changed": PlantedFault(
        _deepspeed({"    engine.step()\n": "    engine.step()\n    model[0].bias.data[0] += engine.global_rank\n"}),
        "unequal copies",
        2,
        "0.bias",
        (1,),
        sweep=True,
    ),
    "FSDP2, one rank's part of a replica changed": PlantedFault(
        _sharded(
            {
                '"cpu", (dist.get_world_size(),)': '"cpu", (2, 1), mesh_dim_names=("replicas", "parts")',
                "    optimizer.zero_grad()\n": "    optimizer.zero_grad()\n"
                "    model[0].weight.to_local().data[0, 0] += 1e-3 * rank\n",
            }
        ),
        "unequal copies",
        2,
        "0.weight part 0",
        (1,),
    ),
    "GAN, one of two models not wrapped": PlantedFault(
        _adversarial(
            {
                "judge = DistributedDataParallel(": "judge = (",
            }
        ),
        "unreduced gradients",
        2,
        "0.weight",
        sweep=True,
    ),
}
"""Each line of the guard."""

FLAT = (
    "from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy\n"
    "model = FullyShardedDataParallel(model, device_id=torch.device('cpu')"
)
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
TIED = "(tied := nn.Linear(16, 16)), nn.Linear(16, 16), nn.Linear(16, 4))\nmodel[4].weight = tied.weight\n"

HEALTHY: Final[Mapping[str, Variant]] = {
    "plain": _plain({}),
    "a rate of 0": _plain({"lr=1e-2": "lr=0.0"}),
    "a group with a rate of 0": _plain(
        {
            "(ddp.parameters(), lr=1e-2)": '([{"params": [*model[:3].parameters()], "lr": 0.0}, '
            '{"params": [*model[3:].parameters()]}], lr=1e-2)'
        }
    ),
    "dropout with other seeds": _plain({"nn.ReLU()": "nn.Dropout(0.1)"}),
    "frozen weights": _plain({f"ddp = {WRAPPER}": f"model[0].requires_grad_(False)\nddp = {WRAPPER}"}),
    "tied weights": _plain({"nn.Linear(16, 4))\n": TIED}),
    "an average on rank 0": _plain(
        {
            f"ddp = {WRAPPER}": "ema = torch.optim.swa_utils.AveragedModel(model) if rank == 0 else None\n"
            f"ddp = {WRAPPER}"
        }
        | _after_step("if ema is not None: ema.update_parameters(model)")
    ),
    "an average on all ranks and another model": _plain(
        {
            f"ddp = {WRAPPER}": f"ddp = {WRAPPER}\n"
            "others = [torch.optim.swa_utils.AveragedModel(model), nn.Sequential(nn.Linear(8, 16))][:: 1 - 2 * rank]"
        }
    ),
    "compiled": _plain({WRAPPER: 'DistributedDataParallel(torch.compile(model, backend="eager"))'}),
    "Adafactor": _plain({"AdamW(ddp.parameters(), lr=1e-2)": "Adafactor(ddp.parameters())"}),
    "transformers' Adafactor": _plain(
        {
            "optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)": "from transformers import Adafactor\n"
            "optimizer = Adafactor(ddp.parameters())",
            "schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)\n": "",
            "        schedule.step()\n": "",
        }
    ),
    "SGD and a bias before a norm": _plain({"AdamW(ddp.parameters(), lr=1e-2)": "SGD(ddp.parameters(), lr=1e-5)"}),
    "LBFGS": _plain(
        {
            "AdamW(ddp.parameters(), lr=1e-2)": "LBFGS(ddp.parameters(), lr=0.1, max_iter=3)",
            "        nn.functional.cross_entropy(ddp(x), y).backward()\n        optimizer.step()\n": """
        def again():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            return loss
        optimizer.step(again)
""",
        }
    ),
    "sparse gradients": _plain(
        {
            "torch.randn(48, 8)": "torch.randint(8, (48,))",
            "nn.Linear(8, 16)": "nn.Embedding(8, 16, sparse=True)",
            "AdamW": "SGD",
        }
    ),
    "weights without gradients in each second step": _plain(
        {
            "model = nn.Sequential(": """
class Halves(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
    def forward(self, x):
        x = self.parts[0](x)
        return self.parts[3](self.parts[1](x) if done % 2 else x)
model = Halves(""",
            WRAPPER: "DistributedDataParallel(model, find_unused_parameters=True)",
        }
    ),
    "LoRA": _plain(
        {
            "nn.Linear(16, 4))\n": "nn.Linear(16, 4))\nfrom peft import LoraConfig, get_peft_model\n"
            'model = get_peft_model(model, LoraConfig(target_modules=["0", "3"], r=2))\n'
        }
    ),
    "steps that loss scaling skips": _plain(
        {
            "torch.manual_seed(rank)\n": 'torch.manual_seed(rank)\nscaler = torch.amp.GradScaler("cpu", 2.0**127)\n',
            "        nn.functional.cross_entropy(ddp(x), y).backward()\n        optimizer.step()\n": """
        scaler.scale(100 * nn.functional.cross_entropy(ddp(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        }
    ),
    "activations computed again": _plain(
        {
            "model = nn.Sequential(": """
from torch.utils.checkpoint import checkpoint


class Again(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


model = Again(""",
            "(ddp(x), y)": "(ddp(x.requires_grad_()), y)",
        }
    ),
    "weights averaged in each fourth step": _plain(
        {WRAPPER: "model"}
        | _after_step("for p in model.parameters() if done % 4 == 3 else (): dist.all_reduce(p.data); p.data /= 2")
    ),
    "a loss through another network": _plain(
        {f"ddp = {WRAPPER}": f"judge = nn.Linear(4, 4)\nddp = {WRAPPER}", "(ddp(x), y)": "(judge(ddp(x)), y)"}
    ),
    "two schedules": _plain(
        {"total_iters=20)\n": "total_iters=20)\nother = torch.optim.lr_scheduler.ConstantLR(optimizer)\n"}
        | _after_step("other.step()")
    ),
    "schedules one after the other": _plain(
        {
            "total_iters=20)\n": "total_iters=4)\nother = torch.optim.lr_scheduler.ConstantLR(optimizer)\nschedule = "
            "torch.optim.lr_scheduler.SequentialLR(optimizer, [schedule, other], [4])\n"
        }
    ),
    "the last batches are fewer on one rank": _plain(
        {
            "batch_size=4": "batch_size=4 + 2 * rank",
            "for epoch in range(2):\n": "with ddp.join():\n  for epoch in range(2):\n",
        }
    ),
    "a batch split by rank": _plain(
        {"sampler=sampler": "shuffle=False", "(ddp(x), y)": "(ddp(x[rank::2]), y[rank::2])"}
    ),
    "an export by rank 0 at the end": _plain(
        {"dist.destroy_process_group()\n": "dist.destroy_process_group()\nif rank == 0:\n    model.half()\n"}
    ),
    "an evaluation in each epoch": _plain(
        {
            "    sampler.set_epoch(epoch)\n": """
    sampler.set_epoch(epoch)
    with torch.no_grad():
        for x, y in DataLoader(samples, batch_size=8):
            model(x)
"""
        }
    ),
    "another optimizer for the second epoch": _plain(
        {
            "    sampler.set_epoch(epoch)\n": "    sampler.set_epoch(epoch)\n"
            "    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)\n"
        }
    ),
    "split optimizer states": _plain(
        {
            "optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)": "from torch.distributed.optim import "
            "ZeroRedundancyOptimizer\n"
            "optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)"
        }
    ),
    "accumulating": _accumulating({}),
    "GAN": _adversarial({}),
    "GAN, five steps to one": _adversarial({"steps_of_judge = 1": "steps_of_judge = 5"}),
    "GAN, gradients through the generator": _adversarial({".detach()": ""}),
    "FSDP2": _sharded({}),
    "an optimizer for each weight, in backward": _sharded(
        {
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n": """
optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}


def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
""",
            "    optimizer.step()\n    optimizer.zero_grad()\n": "",
            CLIP: "",
        }
    ),
    "FSDP2, replicas": _sharded({'"cpu", (dist.get_world_size(),)': '"cpu", (2, 1), mesh_dim_names=("a", "b")'}),
    "FSDP2, parts and one replica": _sharded(
        {'"cpu", (dist.get_world_size(),)': '"cpu", (1, 2), mesh_dim_names=("a", "b")'}
    ),
    "FSDP1": _sharded({SHARD: f"{FLAT})", CLIP: "    model.clip_grad_norm_(1.0)\n"}),
    "FSDP1, own parameters": _sharded({SHARD: f"{FLAT}, use_orig_params=True)", CLIP: ""}),
    "FSDP1, not split": _sharded(
        {SHARD: f"{FLAT}, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)", CLIP: ""}
    ),
    "tensor parallel": _sharded(
        {
            SHARD: "from torch.distributed.tensor import parallel\n"
            'plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}\n'
            "parallel.parallelize_module(model, mesh, plan)",
            "nn.LayerNorm(16)": "nn.Identity()",
            "sampler=DistributedSampler(samples)": "shuffle=False",
            "torch.manual_seed(rank)\n": "",
        }
    ),
    "pipeline": _sharded(
        {
            "fully_shard(model, mesh=mesh)\n": """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if rank == 0 else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
stage = PipelineStage(model, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, nn.functional.cross_entropy)
""",
            "    nn.functional.cross_entropy(model(x), y).backward()\n": "    schedule.step(x) if rank == 0 else "
            "schedule.step(target=y)\n",
            "sampler=DistributedSampler(samples)": "shuffle=False",
        }
    ),
    "Accelerate": _accelerate({}),
    "Fabric": _fabric({}),
    "DeepSpeed": _deepspeed({}),
    "DeepSpeed, the model called": _deepspeed({"(engine(x), y)": "(model(x), y)"}),
    "DeepSpeed, ZeRO-1": _deepspeed({'"stage": 0': '"stage": 1'}),
    "DeepSpeed, ZeRO-2": _deepspeed({'"stage": 0': '"stage": 2'}),
    "DeepSpeed, ZeRO-3": _deepspeed({'"stage": 0': '"stage": 3'}),
    "DeepSpeed, ZeRO-2 in bf16": _deepspeed(
        {'{"stage": 0},': '{"stage": 2},\n    "bf16": {"enabled": True},', "engine(x)": "engine(x.bfloat16())"}
    ),
}
"""Scripts in which nothing is wrong: no fault may be found in them."""

ON_FOUR_RANKS: Final[Mapping[str, Variant]] = {
    "FSDP2, two replicas of two parts": _sharded(
        {'"cpu", (dist.get_world_size(),)': '"cpu", (2, 2), mesh_dim_names=("replicas", "parts")'}
    ),
    "FSDP2 and tensor parallel": _sharded(
        {
            '"cpu", (dist.get_world_size(),)': '"cpu", (2, 2), mesh_dim_names=("data", "tensor")',
            SHARD: "from torch.distributed.tensor import parallel\n"
            'plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}\n'
            'parallel.parallelize_module(model, mesh["tensor"], plan)\n'
            'fully_shard(model, mesh=mesh["data"])',
            "nn.LayerNorm(16)": "nn.Identity()",
            "DistributedSampler(samples)": 'DistributedSampler(samples, 2, mesh["data"].get_local_rank())',
            "torch.manual_seed(rank)\n": "",
            CLIP: "",
        }
    ),
}
"""Further ones, whose ranks form a grid."""

ALWAYS: Final = frozenset(
    {
        "accumulating",
        "a group with a rate of 0",
        "SGD and a bias before a norm",
        "an average on all ranks and another model",
        "LBFGS",
        "steps that loss scaling skips",
        "two schedules",
        "GAN, five steps to one",
        "FSDP2",
        "FSDP1, own parameters",
        "tensor parallel",
        "Accelerate",
        "DeepSpeed, ZeRO-2",
    }
)
"""Healthy scripts that are observed whenever tests run; the others are in the sweeps."""
