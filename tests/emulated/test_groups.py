"""The emulated device's NCCL: what it computes, what it refuses, its streams, and hangs by name."""

from __future__ import annotations

import pytest

from tests.support.softcuda.processes import EmulatedDevice

START = """
import warnings
warnings.simplefilter("ignore", FutureWarning)
import torch
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("nccl", timeout=timedelta(seconds=SECONDS))
rank = dist.get_rank()
torch.cuda.set_device(rank)
mine = torch.arange(4.0, device="cuda") + rank
""".replace("SECONDS", "60")
SOON = START.replace("seconds=60", "seconds=4")

COLLECTIVES = {
    "broadcast": ("dist.broadcast(mine, src=1)", "mine.tolist()", [[1.0, 2.0, 3.0, 4.0]] * 2),
    "all_reduce": ("dist.all_reduce(mine)", "mine.tolist()", [[1.0, 3.0, 5.0, 7.0]] * 2),
    "mean": ("dist.all_reduce(mine, op=dist.ReduceOp.AVG)", "mine.tolist()", [[0.5, 1.5, 2.5, 3.5]] * 2),
    "max": ("dist.all_reduce(mine, op=dist.ReduceOp.MAX)", "mine.tolist()", [[1.0, 2.0, 3.0, 4.0]] * 2),
    "scaled sum": (
        "dist.all_reduce(mine, op=dist._make_nccl_premul_sum(0.5))",
        "mine.tolist()",
        [[0.5, 1.5, 2.5, 3.5]] * 2,
    ),
    "reduce": ("dist.reduce(mine, dst=0)", "mine.tolist() if rank == 0 else 0", [[1.0, 3.0, 5.0, 7.0], 0]),
    "all_gather": (
        "both = [torch.empty_like(mine) for _ in range(2)]; dist.all_gather(both, mine)",
        "[x[0].item() for x in both]",
        [[0.0, 1.0]] * 2,
    ),
    "all_gather_into_tensor": (
        "both = torch.empty(8, device='cuda'); dist.all_gather_into_tensor(both, mine)",
        "both.tolist()",
        [[0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]] * 2,
    ),
    "reduce_scatter_tensor": (
        "half = torch.empty(2, device='cuda'); dist.reduce_scatter_tensor(half, mine, op=dist.ReduceOp.AVG)",
        "half.tolist()",
        [[0.5, 1.5], [2.5, 3.5]],
    ),
    "reduce_scatter": (
        "half = torch.empty(2, device='cuda'); dist.reduce_scatter(half, list(mine.split(2)))",
        "half.tolist()",
        [[1.0, 3.0], [5.0, 7.0]],
    ),
    "all_to_all_single": (
        "other = torch.empty(4, device='cuda'); dist.all_to_all_single(other, mine)",
        "other.tolist()",
        [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]],
    ),
    "all_to_all": (
        "other = [torch.empty(2, device='cuda') for _ in range(2)]; dist.all_to_all(other, list(mine.split(2)))",
        "[x.tolist() for x in other]",
        [[[0.0, 1.0], [1.0, 2.0]], [[2.0, 3.0], [3.0, 4.0]]],
    ),
    "scatter": (
        "one = torch.empty(2, device='cuda'); dist.scatter(one, list(mine.split(2)) if rank == 0 else None, src=0)",
        "one.tolist()",
        [[0.0, 1.0], [2.0, 3.0]],
    ),
    "gather": (
        "both = [torch.empty_like(mine) for _ in range(2)] if rank == 0 else None; dist.gather(mine, both, dst=0)",
        "both and both[1].tolist()",
        [[1.0, 2.0, 3.0, 4.0], None],
    ),
    "objects": (
        "both = [None, None]; dist.all_gather_object(both, {'rank': rank})",
        "both",
        [[{"rank": 0}, {"rank": 1}]] * 2,
    ),
    "send and receive": (
        "dist.send(mine, dst=1) if rank == 0 else dist.recv(mine, src=0)",
        "mine.tolist()",
        [[0.0, 1.0, 2.0, 3.0]] * 2,
    ),
    "batched": (
        "other = torch.empty(4, device='cuda'); works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank),"
        " dist.P2POp(dist.irecv, other, 1 - rank)]); [work.wait() for work in works]",
        "other.tolist()",
        [[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]],
    ),
    "flags": (
        "flag = torch.tensor([rank == 1], device='cuda'); dist.all_reduce(flag, op=dist.ReduceOp.MAX)",
        "flag.item()",
        [True, True],
    ),
    "bf16": ("mine = mine.bfloat16(); dist.all_reduce(mine)", "mine.tolist()", [[1.0, 3.0, 5.0, 7.0]] * 2),
    "a part of the world": (
        "some = [dist.new_group([r]) for r in range(2)]; dist.all_reduce(mine, group=some[rank]); dist.barrier()",
        "mine[0].item()",
        [0.0, 1.0],
    ),
}


def test_collectives(emulated: EmulatedDevice) -> None:
    """Each gives what NCCL gives, without a race, in one world that plays them all."""
    code = START + "result = {}\n"
    for name, (call, value, _) in COLLECTIVES.items():
        code += f"mine = torch.arange(4.0, device='cuda') + rank\n{call}\nresult[{name!r}] = {value}\n"
    runs = emulated.ranks(code + "dist.destroy_process_group()")
    assert [run.stderr for run in runs if run.code] == []
    for rank, run in enumerate(runs):
        assert run.result == {name: values[rank] for name, (_, _, values) in COLLECTIVES.items()}
        assert run.texts("race") == []


def test_a_mesh_splits_its_groups(emulated: EmulatedDevice) -> None:
    """Groups of a device mesh, which torch splits off that of all ranks, are groups of the same device."""
    runs = emulated.ranks(
        """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import os
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
result = []
for name in ("rows", "columns"):
    x = torch.tensor([float(dist.get_rank())], device="cuda")
    dist.all_reduce(x, group=mesh.get_group(name))
    result.append(x.item())
dist.barrier()  # rank 0 has the store in which the others' groups meet
dist.destroy_process_group()
""",
        size=4,
        devices=4,
    )
    assert [run.result for run in runs] == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]], runs[0].stderr


def test_a_collective_frees_with_its_caller(emulated: EmulatedDevice) -> None:
    """Memory is free once the last name of a tensor that was sent is gone: no thread of gloo holds it longer."""
    code = """
dist.all_reduce(mine)
before = torch.cuda.memory_allocated()
result = 0
for _ in range(300):
    sent = mine.clone()
    dist.all_reduce(sent)
    del sent
    result += torch.cuda.memory_allocated() != before
dist.destroy_process_group()
"""
    runs = emulated.ranks(START + code)
    assert [run.result for run in runs] == [0, 0], runs[0].stderr


@pytest.mark.parametrize("wait", [True, False])
def test_a_collective_that_nobody_waits_for(wait: bool, emulated: EmulatedDevice) -> None:
    """An asynchronous collective runs on a stream of NCCL's: who reads its result without a wait is named."""
    wait_or_not = "work.wait()" if wait else "pass"
    runs = emulated.ranks(
        f"{START}work = dist.all_reduce(mine, async_op=True)\n{wait_or_not}\nresult = (mine + 1).tolist()"
    )
    text = (
        "aten::add on the default stream of cuda:{0} reads memory that NCCL's ALLREDUCE on stream 1 of cuda:{0} wrote"
    )
    wanted = [] if wait else [f"{text.format(rank)}, and has not waited for it" for rank in range(2)]
    assert sorted(runs[0].texts("race")) == wanted


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("dist.all_reduce(torch.ones(2))", "No backend type associated with device type cpu"),
        ("dist.all_reduce(torch.ones(2, 2, device='cuda')[:, 0])", "Tensors must be contiguous"),
        ("dist.all_gather_into_tensor(torch.ones(3, device='cuda'), mine)", "output tensor size must be equal to"),
    ],
)  # fmt: skip
def test_refused_tensors(call: str, error: str, emulated: EmulatedDevice) -> None:
    """Tensors of the CPU, with gaps, or of a wrong size."""
    runs = emulated.ranks(
        f"{START}try:\n    {call}\nexcept (RuntimeError, ValueError) as e:\n    result = str(e)\ndist.barrier()"
    )
    assert [str(run.result).startswith(error) for run in runs] == [True, True], runs[0].stderr


@pytest.mark.parametrize("shown", [None, "0"])
def test_two_ranks_on_one_device(shown: str | None, emulated: EmulatedDevice) -> None:
    """NCCL refuses them at their first collective, by whatever name they know the device."""
    code = START.replace("set_device(rank)", "set_device(0)") + "dist.all_reduce(mine)\nresult = True"
    runs = emulated.ranks(code, variables={"CUDA_VISIBLE_DEVICES": shown} if shown else {})
    assert [run.code for run in runs] == [1, 1]
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device" in runs[0].error


def test_one_device_is_shown_to_each_rank(emulated: EmulatedDevice) -> None:
    """Two ranks that both call their device cuda:0 may each have another one."""
    code = f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['RANK']\n{START}".replace(
        "set_device(rank)", "set_device(0)"
    )
    runs = emulated.ranks(code + "dist.all_reduce(mine)\nresult = mine.tolist()\ndist.destroy_process_group()")
    assert [run.result for run in runs] == [[1.0, 3.0, 5.0, 7.0]] * 2, runs[0].stderr


def test_different_collectives_hang(emulated: EmulatedDevice) -> None:
    """Ranks whose collectives of one group differ wait for ever: until NCCL's time is up, and are named."""
    runs = emulated.ranks(SOON + "dist.all_reduce(mine) if rank == 0 else dist.broadcast(mine, src=0)\nresult = True")
    assert [run.code for run in runs] == [1, 1]
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=" in runs[0].error
    assert set(runs[0].texts("hang")) == {
        "ranks start different collectives as number 1 of group 0: rank 0 ALLREDUCE of 4 elements; rank 1 BROADCAST of "
        "4 elements"
    }


def test_groups_in_another_order_hang(emulated: EmulatedDevice) -> None:
    """Ranks that start collectives of two groups in different order wait for each other, and are named."""
    runs = emulated.ranks(
        SOON
        + "groups = [dist.new_group([0, 1], timeout=timedelta(seconds=4)) for _ in range(2)]\n"
        + "[dist.all_reduce(mine, group=group) for group in groups]\n"
        + "for group in (groups if rank == 0 else groups[::-1]):\n    dist.all_reduce(mine, group=group)\nresult = True"
    )
    assert [run.code for run in runs] == [1, 1]
    first, second = "ALLREDUCE number 2 of group 1", "ALLREDUCE number 2 of group 2"
    assert set(runs[0].texts("hang")) == {
        f"rank 0 waits in {first}; rank 1 waits in {second}",
        f"rank 1 waits in {second}; rank 0 waits in {first}",
    }


def test_gloo_moves_tensors_of_a_shared_device(emulated: EmulatedDevice) -> None:
    """Two ranks may share a device over gloo, as they may in a build with CUDA."""
    code = START.replace('"nccl"', '"gloo"').replace("set_device(rank)", "set_device(0)")
    runs = emulated.ranks(code + "dist.all_reduce(mine)\nresult = mine.tolist()\ndist.destroy_process_group()")
    assert [run.result for run in runs] == [[1.0, 3.0, 5.0, 7.0]] * 2, runs[0].stderr


MEETING = """
import os
import torch
import torch.distributed as dist
from unipar.backend.joining import meet
from unipar.config import Config
from unipar.backend.resources import find_foreign_place
config = Config.model_validate({"device": "cuda", "batch": {"total": 2}, "train": {"steps": 1}})
ADOPTED
world = meet(config, find_foreign_place())
world.barrier()
mine = world.sum(torch.ones(1, device=world.device)).item()
bound = dist.group.WORLD.bound_device_id
world.close()
result = [mine, None if bound is None else str(bound)]
"""


def test_a_group_is_told_its_device(emulated: EmulatedDevice) -> None:
    """NCCL guesses it otherwise, in the first barrier."""
    runs = emulated.ranks(MEETING.replace("ADOPTED", ""))
    assert [run.result for run in runs] == [[2.0, "cuda:0"], [2.0, "cuda:1"]], runs[0].stderr


def test_a_barrier_of_a_scripts_group_is_told_its_device(emulated: EmulatedDevice) -> None:
    """A group that the script has made knows no device: torch warns that it uses the current one."""
    runs = emulated.ranks(MEETING.replace("ADOPTED", 'dist.init_process_group("nccl")'))
    assert [run.result for run in runs] == [[2.0, None]] * 2, runs[0].stderr
    assert "using the device under current context" not in runs[0].stderr
