"""Inside a world of ranks that cut sequences: losses and gradients beside those of one process, and refusals."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from unipar_mesh.context import SequenceSplit
from unipar_mesh.context import spread_attention as attention
from unipar_mesh.context.torch_ring import RING_KERNELS, RingKernel

from tests.support import context_models as models
from tests.support.context_models import Case, stack
from unipar.backend import registry
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.errors import TaskError
from unipar.model.transforms import apply_transforms

CONFIG: dict[str, Any] = {"device": "cpu", "batch": {"total": 4}, "train": {"steps": 1}}


def run(place: Place, folder: Path, control: socket.socket | None) -> None:
    """Play all cases of a world of this size, and write down what came out of each."""
    warnings.filterwarnings("ignore")
    made = Config.model_validate(CONFIG | {"parallel": {"data": place.size}})
    world = registry.find_backend("native").join(made, place)
    torch.set_num_threads(1)
    RING_KERNELS["cpu"] = RingKernel(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, cpu_backward)
    chosen: dict[str, Callable[[], Any]] = CASES if place.size == 2 else {name: CASES[name] for name in OF_FOUR}
    said: dict[str, Any] = {}
    for name, case in chosen.items():
        try:
            said[name] = case()
        except TaskError as error:
            said[name] = str(error)
    (folder / f"said-{place.rank}.json").write_text(json.dumps(said), encoding="utf-8")
    world.close()


def cpu_backward(*, logsumexp: Tensor, **kwargs: Any) -> Any:
    """Call the CPU's kernel in torch's ring, which has none; it reads the log-sum-exp as it writes it."""
    lse = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(logsumexp=lse, **kwargs)


def beside(
    case: Case,
    length: int = 24,
    *,
    batch: int = 3,
    way: Any = "gather",
    recompute: str = "none",
    training: bool = True,
    autocast: bool = False,
    by_name: str | None = None,
) -> dict[str, float]:
    """Return how far loss and gradients are from those of one process, and the next random number."""
    torch.manual_seed(0)
    model = case.model().train(training)
    if not autocast:
        model.double()
    words = torch.randint(0, models.WORDS, (batch, length))
    blocks = list(case.blocks)
    if recompute != "none":
        apply_transforms(model, blocks, Config.model_validate(CONFIG | {"model": {"recompute": recompute}}))

    def once(scale: float) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = case.loss(model, words)
        if training:
            (loss * scale).backward()
        return loss.detach().double(), torch.rand(1)

    whole, drawn = once(1.0)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    split = SequenceSplit(model, blocks, dist.group.WORLD, attention=way)  # pyright: ignore[reportArgumentType]
    split.arm()
    with torch.no_grad() if not training else nullcontext():
        loss, drawn_again = once(1.0 / dist.get_world_size())
    split.disarm()
    assert training == bool(wanted)
    off = {"loss": float((loss - whole).abs()), "random": float((drawn - drawn_again).abs())}
    return off | {"gradient": _worst(model, wanted) if training else 0.0}


def _worst(model: nn.Module, wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of the ranks' summed gradients, as a share of the largest element of all."""
    longest = max(float(gradient.abs().max()) for gradient in wanted.values())
    off: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if name in wanted:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            off.append((parameter.grad - wanted[name]).abs().max())
    return float(torch.stack(off).max()) / longest  # not a number, where one is


def logits() -> dict[str, float]:
    """Return how far logits of an evaluation are from one process's: the head sees the whole sequence in its order."""
    torch.manual_seed(0)
    case = models.char_gpt()
    model = case.model().double().eval()
    words = torch.randint(0, models.WORDS, (2, 21))
    with torch.no_grad():
        whole = model(words)
        split = SequenceSplit(model, case.blocks, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        split.arm()
        again = model(words)
        split.disarm()
        after = model(words)
    return {"loss": float((whole - again).abs().max()), "gradient": float((whole - after).abs().max()), "random": 0.0}


def stages() -> dict[str, float]:
    """Return how far two stages of a pipeline are from one process: between both, only parts go on."""
    torch.manual_seed(0)
    case = models.llama()
    model: Any = case.model().double()
    words = torch.randint(0, models.WORDS, (3, 20))
    whole = case.loss(model, words)
    whole.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    first, second = model.model.layers
    kept: list[Tensor] = []
    one = SequenceSplit(model, case.blocks[:1], dist.group.WORLD, leaves=False)  # pyright: ignore[reportArgumentType]
    one.arm()

    def keep(_: nn.Module, __: Any, result: Tensor) -> Tensor:
        kept.append(result)
        return torch.zeros(3, 20, 16, dtype=result.dtype)  # the rest of the model runs on anything

    handle = first.register_forward_hook(keep)
    case.loss(model, words)
    handle.remove()
    one.disarm()
    coming = kept[0].detach().requires_grad_()

    def replace(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (coming, *args[1:])

    handle = second.register_forward_pre_hook(replace)
    two = SequenceSplit(model, case.blocks[1:], dist.group.WORLD, enters=False)  # pyright: ignore[reportArgumentType]
    two.whole_length = words.shape[1]
    two.arm()
    loss = case.loss(model, words)
    (loss / dist.get_world_size()).backward()
    handle.remove()
    two.disarm()
    kept[0].backward(coming.grad)
    return {"loss": float((loss - whole).abs()), "gradient": _worst(model, wanted), "random": 0.0}


def sharded(recompute: str) -> dict[str, float]:
    """Return how far FSDP2 over the same ranks is from one process: its average is 1 / ranks of the gradients' sum."""
    torch.manual_seed(0)
    case = models.gpt2(drop=0.1, cache=False)
    model: Any = case.model().double()
    words = torch.randint(0, models.WORDS, (3, 21))
    torch.manual_seed(7)
    whole = case.loss(model, words)
    whole.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    apply_transforms(model, case.blocks, Config.model_validate(CONFIG | {"model": {"recompute": recompute}}))
    for name in case.blocks:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    split = SequenceSplit(model, case.blocks, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    split.arm()
    case.loss(model, words).backward()  # a second pass begins where the first one ended
    model.zero_grad()
    torch.manual_seed(7)
    loss = case.loss(model, words)
    loss.backward()
    split.disarm()
    off = [(p.grad.full_tensor() - wanted[name]).abs().max() for name, p in model.named_parameters()]
    longest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return {"loss": float((loss - whole).abs()), "gradient": float(torch.stack(off).max()) / longest, "random": 0.0}


def costs() -> dict[str, int]:
    """Return bytes that two blocks keep for the backward, whole and cut, and that a rank sends in each direction."""
    case = models.char_gpt(longest=512)
    words = torch.randint(0, models.WORDS, (2, 512))
    return {
        f"{way}: {name}": number
        for way in ("whole", "gather", "ring", "ulysses")
        for name, number in _costs_of(way, case, words).items()
    }


def _costs_of(way: Any, case: Case, words: Tensor) -> dict[str, int]:
    model: Any = case.model()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    others = dist.get_world_size() - 1
    kept: dict[int, int] = {}
    sent: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return plain(*args)

        return forward

    def gather(plain: Any, whole: Tensor, mine: Tensor, group: Any) -> None:
        sent.append(mine.nbytes * others)
        plain(whole, mine, group=group)

    def scatter(plain: Any, mine: Tensor, whole: Tensor, group: Any) -> None:
        sent.append(mine.nbytes * others)
        plain(mine, whole, group=group)

    def exchange(plain: Any, got: Tensor, mine: Tensor, group: Any) -> None:
        sent.append(mine.nbytes // (others + 1) * others)
        plain(got, mine, group=group)

    def pass_on(plain: Any, both: list[Any]) -> Any:
        sent.append(both[0].tensor.nbytes)
        return plain(both)

    for layer in model.layers:
        layer.forward = watched(layer.forward)
    split = SequenceSplit(model, case.blocks, dist.group.WORLD, attention=way)  # pyright: ignore[reportArgumentType]
    with pytest.MonkeyPatch.context() as patch:
        if way != "whole":
            split.arm()
        model(words[:, :16]).sum().backward()  # the trial of each block
        kept.clear()
        for place, name, instead in (
            (attention, "_ALL_GATHER", gather),
            (attention, "_REDUCE_SCATTER", scatter),
            (dist, "all_to_all_single", exchange),
            (dist, "batch_isend_irecv", pass_on),
        ):
            patch.setattr(place, name, partial(instead, vars(place)[name]))
        result = model(words).sum()
        forward = sum(sent)
        result.backward()
    split.disarm()
    return {"kept": sum(kept.values()), "forward": forward, "backward": sum(sent) - forward}


def skips_a_block() -> dict[str, float]:
    case = models.char_gpt()

    def loss(model: Any, words: Tensor) -> Tensor:
        return model.layers[1](model.token(words)).sum()

    return beside(Case(case.model, loss, case.blocks))


def leaves_early() -> dict[str, float]:
    case = models.char_gpt()

    def loss(model: Any, words: Tensor) -> Tensor:
        return model.layers[0](model.layers[0](model.token(words))).sum()

    return beside(Case(case.model, loss, case.blocks))


def no_blocks() -> None:
    SequenceSplit(models.char_gpt().model(), (), dist.group.WORLD)  # pyright: ignore[reportArgumentType]


def checkpoints_itself() -> dict[str, float]:
    case = models.gpt2(cache=False)

    def made() -> nn.Module:
        model: Any = case.model()
        model.gradient_checkpointing_enable()
        return model

    return beside(Case(made, case.loss, case.blocks))


def compiled() -> None:
    model: Any = models.char_gpt().model()
    model.layers[1].forward = torch.compile(model.layers[1].forward, backend="eager")
    SequenceSplit(model, ("layers.0", "layers.1"), dist.group.WORLD).arm()  # pyright: ignore[reportArgumentType]


def _bias(x: Tensor) -> dict[str, Any]:
    places = torch.arange(x.shape[1], dtype=x.dtype)
    scale = x.mean(1).sum() * 0.1  # learned outside the blocks: ranks have parts of its gradient
    bias = ((places - places.unsqueeze(1)) * scale.abs()).masked_fill(places > places.unsqueeze(1), float("-inf"))
    return {"bias": bias, "gate": x.mean(-1, keepdim=True), "scale": scale.reshape(1)}


def _bias_of_heads(x: Tensor) -> dict[str, Any]:
    heads = torch.arange(1.0, 5.0, dtype=x.dtype).reshape(1, 4, 1, 1)
    return {**(one := _bias(x)), "bias": one["bias"] * heads}


CASES: dict[str, Callable[[], Any]] = {
    **{f"char gpt, {way}, {length}": lambda way=way, length=length: beside(models.char_gpt(), length, way=way)
       for way in ("gather", "ring", "ulysses") for length in (24, 29, 2)},
    **{f"{name}, {way}": lambda case=case, way=way: beside(case(), 21, way=way) for name, case in {
        "gpt2 with a cache and dropout": lambda: models.gpt2(drop=0.1),
        "gpt2, padded": lambda: models.gpt2(mask=True),
        "llama": models.llama,
        "gpt2, padded, dropout in attention": lambda: models.gpt2(drop=0.1, mask=True),
        "llama, padded": lambda: models.llama(mask=True),
        "mistral, a window of 5": models.mistral,
        "llama, positions given": lambda: models.llama(places=True),
        "bert, padded, with dropout": models.bert,
        "vit": models.vit,
        "torch's encoder layers with dropout": models.transformer,
        "a learned bias": lambda: stack(models.Biased, _bias),
        "another sequence": lambda: stack(models.Crossing, lambda x: {"other": x[:, :5].sin()}),
        "no attention, dropout of flat tokens": lambda: stack(models.Flat),
        "6 heads that share 3 of keys": lambda: stack(models.Grouped),
        "a bias made in the block": lambda: stack(models.Rescaling, _bias),
        "a mask for each head": lambda: stack(models.Biased, _bias_of_heads),
        "attention in a compiled part": lambda: stack(models.PartlyCompiled),
    }.items() for way in ("gather", "ulysses")},
    "one head, gather": lambda: beside(stack(models.OneHead), 21),
    "llama, ring": lambda: beside(models.llama(), 21, way="ring"),
    "llama, padded, ring": lambda: beside(models.llama(mask=True), 21, way="ring"),
    "bert, padded, with dropout, ring": lambda: beside(models.bert(), 21, way="ring"),
    "vit, ring": lambda: beside(models.vit(), 21, way="ring"),
    "char gpt, torch's ring": lambda: beside(models.char_gpt(), 24, way="torch"),
    "llama, torch's ring": lambda: beside(models.llama(), 24, way="torch"),
    "vit, torch's ring": lambda: beside(models.vit(), 21, way="torch"),
    "gpt2, recomputed, torch's ring": lambda: beside(models.gpt2(cache=False), 24, recompute="blocks", way="torch"),
    "char gpt, bf16, torch's ring": lambda: beside(models.char_gpt(), 24, autocast=True, way="torch"),
    "a mask of its own": lambda: beside(stack(models.Remembering)),
    "gpt2, recomputed": lambda: beside(models.gpt2(drop=0.1, cache=False), recompute="blocks"),
    "gpt2, recomputed, ring": lambda: beside(models.gpt2(drop=0.1, cache=False), recompute="blocks", way="ring"),
    "char gpt, recomputed in part": lambda: beside(models.char_gpt(), 29, recompute="selective", way="ring"),
    "char gpt, bf16": lambda: beside(models.char_gpt(), 29, autocast=True),
    "llama, mask, bf16": lambda: beside(models.llama(mask=True), autocast=True),
    "char gpt, bf16, ring": lambda: beside(models.char_gpt(), 29, autocast=True, way="ring"),
    "gpt2, recomputed, ulysses": lambda: beside(models.gpt2(drop=0.1, cache=False), recompute="blocks", way="ulysses"),
    "char gpt, recomputed in part, ulysses": lambda: beside(
        models.char_gpt(), 29, recompute="selective", way="ulysses"
    ),
    "mistral, recomputed, ulysses": lambda: beside(models.mistral(cache=False), recompute="blocks", way="ulysses"),
    "char gpt, bf16, ulysses": lambda: beside(models.char_gpt(), 29, autocast=True, way="ulysses"),
    "llama, evaluated": lambda: beside(models.llama(), 29, training=False),
    "as many samples as positions": lambda: beside(models.llama(), 24, batch=24),
    "as many heads as positions of a rank": lambda: beside(models.llama(), 8),
    "logits": logits,
    "two stages": stages,
    "bytes": costs,
    "under FSDP2": lambda: sharded("none"),
    "under FSDP2, recomputed": lambda: sharded("blocks"),
    "refused: torch's ring, a mask": lambda: beside(models.llama(mask=True), 24, way="torch"),
    "refused: torch's ring, dropout": lambda: beside(models.gpt2(drop=0.1), 24, way="torch"),
    "refused: torch's ring, parts that differ": lambda: beside(models.char_gpt(), 29, way="torch"),
    "refused: ulysses, one head": lambda: beside(stack(models.OneHead), 21, way="ulysses"),
    "refused: ulysses, few positions": lambda: beside(stack(models.Rescaling, _bias), 3, batch=2, way="ulysses"),
    "refused: eager": lambda: beside(models.gpt2(attention="eager")),
    "refused: positions": lambda: beside(stack(models.Positioned)),
    "refused: own mask": lambda: beside(stack(models.MasksItself)),
    "refused: products": lambda: beside(stack(models.Products)),
    "refused: shift": lambda: beside(stack(models.Shifting)),
    "refused: noise": lambda: beside(stack(models.Noisy)),
    "refused: image": lambda: beside(Case(models.Convolution, lambda m, w: m(w), ("blocks.0", "blocks.1"))),
    "refused: sequence first": lambda: beside(models.sequence_first()),
    "refused: padding of torch's layers": lambda: beside(models.transformer(padding=True)),
    "refused: as many samples as positions": lambda: beside(models.llama(places=True), 24, batch=24),
    "refused: too short": lambda: beside(models.char_gpt(), 1),
    "refused: a block left out": skips_a_block,
    "refused: a block twice": leaves_early,
    "refused: no blocks": no_blocks,
    "refused: own recomputing": checkpoints_itself,
    "refused: compiled": compiled,
}  # fmt: skip
"""What is played: each returns differences, or ends in a TaskError, whose sentence is kept."""

OF_FOUR = (
    "char gpt, gather, 29",
    "char gpt, ring, 29",
    "gpt2 with a cache and dropout, gather",
    "llama, padded, ring",
    "llama, ring",
    "char gpt, ulysses, 29",
    "llama, ulysses",
    "llama, padded, ulysses",
    "gpt2 with a cache and dropout, ulysses",
    "a bias made in the block, ulysses",
    "char gpt, torch's ring",
    "llama, torch's ring",
    "bytes",
    "refused: too short",
)
"""Cases that are played by four ranks, too."""
