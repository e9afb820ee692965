"""Inside a world whose ranks cut blocks: each block's part beside the whole block."""

from __future__ import annotations

import copy
import json
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from tests.support.tensor_blocks import Called, library_blocks, own_blocks
from unipar.backend import registry
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.errors import TaskError

WAYS = ("train", "eval", "recompute", "other shape")
FREE = ("char_gpt", "nanogpt", "nanogpt slow", "odd", "unequal", "lora", "timm", "torch")
"""Blocks that take a batch of any shape."""


def join(place: Place) -> Any:
    """Return the world."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    batch = {"total": place.size, "micro": 1}
    made = {"device": "cpu", "parallel": {"data": place.size}, "batch": batch, "train": {"steps": 1}}
    return registry.find_backend("native").join(Config.model_validate(made), place)


def fresh(value: Any, dtype: torch.dtype) -> Any:
    """Return copies of tensors, which take gradients if those did."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = x.detach().clone()
        return made.to(dtype).requires_grad_(x.requires_grad) if made.is_floating_point() else made

    return tree_map(one, value)


def longer(name: str, value: Any) -> Any:
    """Return arguments with a batch of three in place of two; of another length, too, where the block takes any."""

    def one(x: Any) -> Any:
        if isinstance(x, Tensor) and name in FREE:
            return torch.randn(3, 5, x.shape[-1], dtype=x.dtype, generator=Generator().manual_seed(2)).requires_grad_()
        if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] == 2:
            return torch.cat([x, x[:1]]).detach().requires_grad_(x.requires_grad)
        return x

    return tree_map(one, value)


def results(block: nn.Module, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any], Tensor]:
    """Return outputs and gradients of the inputs, gradients by parameter, and the generator's state."""
    torch.manual_seed(3)
    out = block(*args, **kwargs)
    outputs = [o for o in tree_leaves(out) if isinstance(o, Tensor) and o.is_floating_point()]
    generator = Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for o in outputs:
        total = total + (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
    total.backward()
    inputs = [x.grad for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    gradients = {name: p.grad for name, p in block.named_parameters()}
    return [o.detach() for o in outputs] + inputs, gradients, torch.get_rng_state()


def off(part: Any, whole: Any) -> float:
    """Return how far two tensors are apart, in lengths of the second; one that vanishes has length 1e-2."""
    if part is None or whole is None:
        return 0.0 if part is whole else float("inf")
    return ((part - whole).norm() / max(float(whole.norm()), 1e-2)).item()


def compared(name: str, called: Called, rank: int, ranks: int, *, sequence: bool) -> dict[str, Any]:
    """Return the largest difference between a block in parts and the whole block, in each way."""
    from unipar_mesh.sequence.sequence_plan import add_sequence
    from unipar_mesh.tensor.cuts import cut_parameters
    from unipar_mesh.tensor.tensor_parallel import arm_block
    from unipar_mesh.tensor.tensor_plan import derive_block_plan

    from unipar.model.transforms import _recompute_forward  # pyright: ignore[reportPrivateUsage]

    block, args, kwargs = called[0].double().train(), *fresh(called[1:], torch.float64)
    if not any(x.requires_grad for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
        args[0].requires_grad_()
    generator = Generator().manual_seed(1)
    with torch.no_grad():
        for p in block.parameters():  # no bias of zeros, no norm of ones
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    plans: list[Any] = [derive_block_plan(block, args, kwargs, ranks) if rank == 0 else None]
    if sequence and rank == 0:
        try:
            plans = [add_sequence(name, block, args, kwargs, plans[0])]
        except TaskError as e:
            plans = [str(e)]
    dist.broadcast_object_list(plans)  # rank 0 alone derives it
    if isinstance(plans[0], str):
        return {"refused": plans[0]}
    cuts = cut_parameters(block, plans[0])
    said: dict[str, Any] = {"cuts": len(plans[0].cuts)}
    for way in WAYS:
        if way == "other shape" and name == "torch masked":
            continue
        whole, part = copy.deepcopy(block), copy.deepcopy(block)
        for path, cut in cuts.items():
            owner, _, key = path.rpartition(".")
            module = part.get_submodule(owner)
            old = module.get_parameter(key)
            module.register_parameter(key, nn.Parameter(cut.local(old.detach(), rank), old.requires_grad))
        for one in (whole, part):
            one.train(way != "eval")
            if way == "recompute":
                _recompute_forward(one, selective=False)
        arm_block(part, plans[0], dist.group.WORLD)
        given = longer(name, (args, kwargs)) if way == "other shape" else (args, kwargs)
        expected, gradients, state = results(whole, *fresh(given, torch.float64))
        found, own, own_state = results(part, *fresh(given, torch.float64))
        worst = [off(x, y) for x, y in zip(found, expected, strict=True)]
        for path, gradient in gradients.items():
            local = gradient if gradient is None or path not in cuts else cuts[path].local(gradient, rank)
            worst.append(off(own[path], local))
        said[way] = max(worst)
        said[f"{way}: same random numbers"] = torch.equal(state, own_state)
    return said


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Write down the differences of all blocks of this world's kind."""
    world = join(place)
    torch.manual_seed(0)
    blocks = own_blocks(0.1) if (folder / "own").exists() else library_blocks(0.1, attention="sdpa")
    if (folder / "eager").exists():
        blocks = library_blocks(0.1, attention="eager")
    sequence = (folder / "sequence").exists()
    said = {name: compared(name, called, place.rank, place.size, sequence=sequence) for name, called in blocks.items()}
    (folder / f"said-{place.rank}.json").write_text(json.dumps(said), encoding="utf-8")
    world.close()


class Words(nn.Module):
    """Reads words and scores them, with one table or two."""

    def __init__(self, *, tied: bool, bias: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8, padding_idx=3), nn.Linear(8, 32, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    @override
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)))


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "mean": lambda z, y: F.cross_entropy(z.view(-1, 32), y.view(-1)),
    "sum of a module": lambda z, y: nn.CrossEntropyLoss(reduction="sum")(z.flatten(0, 1), y.flatten()) / 7,
    "none": lambda z, y: (F.cross_entropy(z.transpose(1, 2), y, reduction="none") * torch.arange(5)).sum(),
    "ignored": lambda z, y: F.cross_entropy(z.reshape(-1, z.size(-1)), y.reshape(-1), ignore_index=4),
    "smoothed": lambda z, y: F.cross_entropy(z.float().view(-1, 32), y.view(-1), label_smoothing=0.1, ignore_index=4),
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].contiguous().view(-1, z.shape[-1]), y[:, 1:].reshape(-1)),
    "gathered: log_softmax": lambda z, y: -z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
    "gathered: weighted": lambda z, y: F.cross_entropy(z.view(-1, 32), y.view(-1), weight=torch.arange(32.0) + 1),
    "gathered: penalty": lambda z, y: F.cross_entropy(z.view(-1, 32), y.view(-1)) + z.square().mean() + (z * z).mean(),
}
"""Losses of words; those that need the logits of all words at once are called so."""


def cut_by_engine(model: nn.Module, rank: int, ranks: int) -> None:
    """Cut a model's vocabulary as the engine does."""
    from unipar_mesh.tensor.vocabulary import arm_vocabulary, cut_vocabulary, find_vocabulary

    found = find_vocabulary(model, [], ranks)
    made: dict[int, nn.Parameter] = {}
    for path, cut in cut_vocabulary(model, found, ranks).items():
        owner, _, key = path.rpartition(".")
        module = model.get_submodule(owner)
        old = module.get_parameter(key)
        local = made.setdefault(id(old), nn.Parameter(cut.local(old.detach(), rank)))
        module.register_parameter(key, local)
    group: Any = dist.group.WORLD
    arm_vocabulary(model, found, group)


def cut_by_script(model: nn.Module, rank: int, ranks: int) -> None:
    """Cut a model's vocabulary as an exported script does."""
    from unipar_mesh.scripts.mesh_parts import Blocks, Ranks
    from unipar_mesh.tensor.cut_logits import compute_on_words

    blocks = Blocks(Ranks(dist.group.WORLD), [])
    blocks.cut_words(model, "table", "head", compute_on_words)
    assert blocks.cut >= {"table.weight", "head.weight"}


def words(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Write down differences between a split vocabulary and a whole one, and how often logits were gathered."""
    world = join(place)
    from unipar_mesh.tensor.vocabulary import cut_vocabulary, find_vocabulary

    gathers: list[int] = []
    plain = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathers.append(1)
        return plain(*args, **kwargs)

    dist.all_gather = counted
    said: dict[str, Any] = {}
    cases = [(*case, cut) for cut in (cut_by_engine, cut_by_script) for case in ((True, False), (False, True))]
    for tied, bias, cut_model in cases:
        torch.manual_seed(0)
        whole = Words(tied=tied, bias=bias)
        ids = torch.randint(0, 32, (4, 5))
        ids[0, :2], labels = 3, torch.randint(0, 32, (4, 5))
        labels[1, :3] = 4
        for name, loss in LOSSES.items():
            part, whole = copy.deepcopy(whole), copy.deepcopy(whole)
            cuts = cut_vocabulary(whole, find_vocabulary(whole, [], place.size), place.size)
            cut_model(part, place.rank, place.size)
            gathers.clear()
            mine, theirs = part(ids), whole(ids)
            own, expected = loss(mine, labels), loss(theirs, labels)
            times = len(gathers)
            own.backward()
            expected.backward()
            worst = [off(own.detach(), expected.detach())]
            for path, cut in cuts.items():
                gradient: Any = whole.get_parameter(path).grad
                worst.append(off(part.get_parameter(path).grad, cut.local(gradient, place.rank)))
            right = torch.equal(mine.argmax(-1), theirs.argmax(-1)) and mine.shape == theirs.shape
            said[f"{cut_model.__name__} {'tied' if tied else 'apart'}: {name}"] = [max(worst), times, right]
            whole.zero_grad()
    (folder / f"said-{place.rank}.json").write_text(json.dumps(said), encoding="utf-8")
    world.close()
