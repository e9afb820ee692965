"""Tensor and pipeline parallelism of the character GPT, written by hand with torch.distributed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from typing_extensions import override

from benchmarks.loops import CLIP, adamw, constant_schedule
from benchmarks.timing import Loop
from examples.char_gpt import GPT, Block

Codes = tuple[Tensor, Tensor]


def loss_of(logits: Tensor, codes: Tensor) -> Tensor:
    """Return the loss of the character GPT."""
    return F.cross_entropy(logits.flatten(0, 1), codes.flatten())


def norm_over_ranks(own: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> Tensor:
    """Return the norm of gradients that are each on one rank, and of others that are on all of them."""
    square = get_total_norm(own).square()
    dist.all_reduce(square)
    return (square + get_total_norm(shared).square()).sqrt() if shared else square.sqrt()


def gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters."""
    return [p.grad for p in parameters if p.grad is not None]


# Tensor parallelism, as Megatron-LM has it


@final
class Copy(torch.autograd.Function):
    """Identity, whose backward adds up the gradients of all ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


@final
class Reduce(torch.autograd.Function):
    """Sum over all ranks, whose backward is the identity."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@final
class TensorBlock(nn.Module):
    """Block with a part of the heads and of the middle layer; its parts have the names of the whole block's."""

    def __init__(self, whole: Block, rank: int, ranks: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = whole.heads // ranks, whole.norm1, whole.norm2
        up, down, width = whole.mlp[0], whole.mlp[2], whole.out.out_features
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        qkv = whole.qkv.weight.detach().view(3, ranks, width // ranks, width)[:, rank]
        self.qkv, self.out = linear(qkv.reshape(-1, width)), linear(whole.out.weight.detach().chunk(ranks, 1)[rank])
        first = linear(up.weight.detach().chunk(ranks)[rank], up.bias.detach().chunk(ranks)[rank])
        self.mlp = nn.Sequential(first, nn.GELU(), linear(down.weight.detach().chunk(ranks, 1)[rank], down.bias))

    @override
    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(copied(self.norm1(x))).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + reduced(self.out(seen.transpose(1, 2).flatten(2)))
        up, gelu, down = self.mlp
        assert isinstance(down, nn.Linear)
        return x + reduced(F.linear(gelu(up(copied(self.norm2(x)))), down.weight)) + down.bias


def copied(x: Tensor) -> Tensor:
    """Return the input of a matrix that is cut by columns."""
    return Copy.apply(x)  # pyright: ignore[reportReturnType]


def reduced(x: Tensor) -> Tensor:
    """Return the whole output of a matrix that is cut by rows."""
    return Reduce.apply(x)  # pyright: ignore[reportReturnType]


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer with these values."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


def tensor_loop(model: GPT, micros: Sequence[Codes]) -> Loop:
    """Return the loop over a model whose blocks are cut; the model is changed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks: Any = model.layers
    model.layers = nn.ModuleList(TensorBlock(block, rank, ranks) for block in blocks)
    cut = [
        p for name, p in model.named_parameters() if any(n in name for n in ("qkv", "out.", "mlp.0", "mlp.2.weight"))
    ]
    known = {id(p) for p in cut}
    whole = [p for p in model.parameters() if id(p) not in known]
    optimizer = adamw(model)
    schedule, parameters = constant_schedule(optimizer), tuple(model.parameters())

    def step() -> None:
        for codes, targets in micros:
            (loss_of(model(codes), targets) / len(micros)).backward()
        norm = norm_over_ranks(gradients(cut), gradients(whole))
        clip_grads_with_norm_(parameters, CLIP, norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


# A pipeline of two stages, after the example of torchtitan: blocks that are absent are replaced by the identity


def pipeline_loop(model: GPT, micros: Sequence[Codes], schedule: Literal["1f1b", "gpipe"]) -> Loop:
    """Return the loop over a model of which each of two ranks has half of the blocks; the model is changed."""
    rank, half, count = dist.get_rank(), len(model.layers) // 2, len(micros)
    for i in range(len(model.layers)):
        if (i < half) == (rank == 1):
            model.layers[i] = nn.Identity()
    width = model.head.in_features
    if rank == 0:
        del model.norm
    else:
        del model.place
    optimizer = adamw(model)
    rates, parameters = constant_schedule(optimizer), tuple(model.parameters())
    tied = model.token.weight
    once = [p for p in parameters if p is not tied or rank == 0]  # the tied matrix counts once in the norm
    shape = (*micros[0][0].shape, width)
    step = (first_stage if rank == 0 else last_stage)(model, micros, shape)
    order = orders(schedule, rank, count)

    def whole_step() -> None:
        step(order)
        assert tied.grad is not None
        dist.all_reduce(tied.grad)
        clip_grads_with_norm_(parameters, CLIP, norm_over_ranks(gradients(once)))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()

    return whole_step


Order = Sequence[tuple[bool, int]]
"""Forward (True) or backward of a microbatch, in the order in which a stage runs them."""


def orders(schedule: str, rank: int, count: int) -> Order:
    """Return the order of one of two stages."""
    ahead = count if schedule == "gpipe" else 1 - rank
    order = [(True, i) for i in range(ahead)]
    for i in range(count - ahead):
        order += [(True, i + ahead), (False, i)]
    return [*order, *((False, i) for i in range(count - ahead, count))]


def first_stage(model: GPT, micros: Sequence[Codes], shape: Sequence[int]) -> Callable[[Order], None]:
    """Return the forwards and backwards of the stage with the embeddings."""

    def run(order: Order) -> None:
        live: dict[int, tuple[Tensor, Any]] = {}
        for forward, i in order:
            if forward:
                codes = micros[i][0]
                x = model.token(codes) + model.place(torch.arange(codes.shape[1]))
                for layer in model.layers:
                    x = layer(x)
                live[i] = x, dist.isend(x.detach(), 1)
            else:
                x, sent = live.pop(i)
                gradient = torch.empty(shape)
                dist.recv(gradient, 1)
                sent.wait()
                x.backward(gradient)

    return run


def last_stage(model: GPT, micros: Sequence[Codes], shape: Sequence[int]) -> Callable[[Order], None]:
    """Return the forwards and backwards of the stage with the head."""

    def run(order: Order) -> None:
        live: dict[int, tuple[Tensor, Tensor]] = {}
        sent: list[tuple[Any, Tensor]] = []
        for forward, i in order:
            if forward:
                x = torch.empty(shape)
                dist.recv(x, 0)
                x.requires_grad_()
                out = x
                for layer in model.layers:
                    out = layer(out)
                live[i] = x, loss_of(model.head(model.norm(out)), micros[i][1]) / len(micros)
            else:
                x, loss = live.pop(i)
                loss.backward()
                assert x.grad is not None
                sent.append((dist.isend(x.grad, 0), x.grad))
        for work, _ in sent:
            work.wait()

    return run
