"""DeepSpeed's ZeRO-0 with experts over ranks clips by the mean of the ranks' norms, each with other experts."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import output_capturing

CLIP = 0.05

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2} | {
    "initializer_range": 0.3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "attn_implementation": "eager",
}


def train(rank: int, stage: int) -> None:
    """Take one step of SGD at a rate of 1, whose length is that of the clipped gradient."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_SIZE": "0"}
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    registry: Any = type(vars(output_capturing)["_CAN_RECORD_REGISTRY"])
    answer = registry.get  # transformers 5.23 answers None where AutoEP expects its default

    def get(self: Any, key: Any, default: Any = None) -> Any:
        found = answer(self, key)
        return default if found is None else found

    registry.get = get
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }
    model: Any = MixtralForCausalLM(MixtralConfig(**SIZES))
    engine: Any = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    changes = {name: (p.detach() - before[name]).square().sum() for name, p in engine.module.named_parameters()}
    experts = torch.stack([change for name, change in changes.items() if ".experts." in name]).sum()
    dense = torch.stack([change for name, change in changes.items() if ".experts." not in name]).sum()
    dist.all_reduce(experts)  # each rank holds others
    if rank == 0:
        print(f"ZeRO-{stage}: a gradient clipped to {CLIP} has the norm {float(dense + experts) ** 0.5:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29574")
    for zero_stage in (0, 1):
        spawn(train, (zero_stage,), nprocs=2)
