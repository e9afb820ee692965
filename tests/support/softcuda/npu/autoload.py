"""Entry point that torch calls at the end of its import: the device, its module and its collectives."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.support.softcuda import activation, groups
from tests.support.softcuda.profiles import SWITCH

KIND = "npu"


def autoload() -> None:
    """Let torch have the device under the name npu, if the environment asks for it."""
    if os.environ.get(SWITCH) and activation.profile().kind == KIND:
        activation.settle_devices()
        native = activation.load_native()
        torch.utils.rename_privateuse1_backend(KIND)
        torch.utils.generate_methods_for_privateuse1_backend()
        from tests.support.softcuda.npu import device_module

        whole_torch: Any = torch
        whole_torch._register_device_module(KIND, device_module)
        _add_collectives(native)


def _add_collectives(native: Any) -> None:
    import torch.distributed as dist

    native.bind_groups()
    compiled: Any = vars(torch)["_C"]
    group_class = groups.group_class(groups.HCCL, compiled._distributed_c10d, native, compiled)

    def create(creation: Any, options: Any) -> Any:
        options = options or group_class.Options()
        options._timeout, options.group_name = creation.timeout, creation.group_id
        options.global_ranks_in_group = creation.global_ranks_in_group
        return group_class(creation.store, creation.group_rank, creation.group_size, options)

    dist.Backend.register_backend("hccl", create, extended_api=True, devices=[KIND])
