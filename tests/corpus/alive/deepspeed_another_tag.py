"""DeepSpeed's ZeRO-3 loads the latest checkpoint instead of the one of the tag, without optimizer states."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
os.environ.setdefault("MASTER_PORT", "29571")

import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def create() -> tuple[Any, nn.Linear]:
    """Return an engine, and its model, whose weight is 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False)[0], model


def weight_of(model: nn.Linear) -> float:
    """Return the weight, gathered."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return round(float(model.weight), 3)


if __name__ == "__main__":
    logging.getLogger("DeepSpeed").setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        engine, model = create()
        engine.save_checkpoint(folder, tag="earlier")
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        engine.save_checkpoint(folder, tag="later")
        other, loaded = create()
        with redirect_stdout(StringIO()):  # it prints what it reads
            path, _ = other.load_checkpoint(folder, tag="earlier", load_optimizer_states=False)
        print(f"weight when 'earlier' was saved: 0.0; when 'later' was: {weight_of(model)}")
        print(f"load_checkpoint(tag='earlier') says {path.split('/')[-2]!r} and loads {weight_of(loaded)}")
