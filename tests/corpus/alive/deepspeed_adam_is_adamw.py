"""DeepSpeed's {"type": "Adam"} is AdamW."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import nn

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
os.environ.setdefault("MASTER_PORT", "29573")

import deepspeed

if __name__ == "__main__":
    logging.getLogger("DeepSpeed").setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    asked = {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.1, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": asked}
    model: Any = nn.Linear(1, 1)
    parameters: Any = list(model.parameters())
    made = deepspeed.initialize(model=model, model_parameters=parameters, config=config, dist_init_required=False)[1]
    print(f"asked for {asked['type']}, got {type(made).__name__}")
