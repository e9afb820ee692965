"""Twelve tasks as people train them, each beside the loop in plain PyTorch that somebody would write for it.

A loop takes the model as it was made, reads the global batches in order, and yields what each step gave. It knows
neither unipar nor ranks: where microbatches make a difference (BatchNorm, dropout, a router's balance), it cuts the
batch into microbatches of `MICRO` samples, as one rank and two ranks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from typing_extensions import override

import unipar
from unipar.utils.seeding import mix_seed

TOTAL, MICRO, STEPS = 16, 4, 6
WORDS, LENGTH = 31, 8


class Step(NamedTuple):
    """Results of one optimizer step."""

    loss: float
    norm: float
    """Norm of all gradients before they are clipped."""

    rates: list[float]
    """Learning rate of each of the optimizer's groups, as the step used it."""


Loop = Callable[[Any], Iterator[Step]]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sentences() -> Tensor:
    return torch.randint(0, WORDS, (TOTAL * STEPS, LENGTH), generator=torch.Generator().manual_seed(0))


def classified() -> TensorDataset:
    """Return points of ten coordinates in three classes; the last batch of the run has half as many."""
    x = numbers(1, TOTAL * STEPS - TOTAL // 2, 10)
    return TensorDataset(x, (x @ numbers(2, 10, 3)).argmax(1))


def gpt2(**settings: Any) -> Any:
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **settings))


NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)


# Padding with -100: a mean over the words of the whole batch, however they are spread over microbatches


class Texts(Dataset[Tensor]):
    """Texts of two to eight words."""

    def __len__(self) -> int:
        return TOTAL * STEPS

    @override
    def __getitem__(self, index: int) -> Tensor:
        return sentences()[index, : 2 + index * index % 7]


def pad(texts: list[Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": pad_sequence(texts, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
    }


class Padding(unipar.Task):
    @override
    def model(self) -> nn.Module:
        return gpt2(**NO_DROPOUT)

    @override
    def data(self) -> Any:
        return DataLoader(Texts(), TOTAL, collate_fn=pad)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss

    @override
    def weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()


def padding(model: Any) -> Iterator[Step]:
    optimizer = adamw(model.parameters())
    for batch in DataLoader(Texts(), TOTAL, collate_fn=pad):
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))


# Accumulation, with a last batch that is half as large


class Accumulation(unipar.Task):
    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    @override
    def data(self) -> Any:
        return classified()

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


def accumulation(model: nn.Module) -> Iterator[Step]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for x, y in DataLoader(classified(), TOTAL):
        total = 0.0
        for some, answers in zip(x.split(MICRO), y.split(MICRO), strict=True):
            loss = F.cross_entropy(model(some), answers) * len(some) / len(x)
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(total, norm.item(), rates_of(optimizer))


# Warmup: three steps up, then half a cosine down to a tenth


class Warmup(Accumulation):
    pass


def warmup(model: nn.Module) -> Iterator[Step]:
    optimizer = adamw(model.parameters())
    up = LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    down = CosineAnnealingLR(optimizer, T_max=STEPS - 3 - 1, eta_min=1e-3)
    schedule = SequentialLR(optimizer, [up, down], milestones=[3])
    for x, y in DataLoader(classified(), TOTAL):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))
        schedule.step()


# BatchNorm, over images that are shifted and mirrored


class Images(Dataset[tuple[Tensor, int]]):
    """Noise in two classes; each image has an augmentation of its own."""

    def __len__(self) -> int:
        return TOTAL * STEPS

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(1, 8, 8, generator=draw) + index % 2
        image = image.roll(int(torch.randint(-2, 3, (), generator=draw)), dims=2)
        return (image.flip(2) if torch.rand((), generator=draw) < 0.5 else image), index % 2


class BatchNorm(unipar.Task):
    @override
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
        )

    @override
    def data(self) -> Any:
        return Images()

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, classes = batch
        return F.cross_entropy(model(images), classes)


def batch_norm(model: nn.Module) -> Iterator[Step]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, classes in DataLoader(Images(), TOTAL):
        total = 0.0
        for some, answers in zip(images.split(MICRO), classes.split(MICRO), strict=True):
            loss = F.cross_entropy(model(some), answers) / (TOTAL // MICRO)
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(total, norm.item(), rates_of(optimizer))


# LoRA


class Lora(unipar.Task):
    @override
    def model(self) -> nn.Module:
        adapter = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
        wrapped: Any = get_peft_model(gpt2(**NO_DROPOUT), adapter)
        return wrapped

    @override
    def data(self) -> Any:
        return TensorDataset(sentences())

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (words,) = batch
        return model(input_ids=words, labels=words).loss


def lora(model: nn.Module) -> Iterator[Step]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(trained)
    for (words,) in DataLoader(TensorDataset(sentences()), TOTAL):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        norm = clip_grad_norm_(trained, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))


# Two passes: the answers to a point and to its mirror image are to be the same


class TwoPasses(Accumulation):
    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        answers = model(x)
        return F.cross_entropy(answers, y) + 0.5 * (answers - model(-x)).square().mean()


def two_passes(model: nn.Module) -> Iterator[Step]:
    optimizer = adamw(model.parameters())
    for x, y in DataLoader(classified(), TOTAL):
        answers, mirrored = model(x), model(-x)
        loss = F.cross_entropy(answers, y) + 0.5 * (answers - mirrored).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))


# A mixture of experts, whose router's auxiliary loss is that of a microbatch


class Experts(Lora):
    @override
    def model(self) -> nn.Module:
        sizes = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "hidden_size": 16, "intermediate_size": 16}
        parts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        router = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        config: Any = MixtralConfig
        return MixtralForCausalLM(config(use_cache=False, **sizes, **parts, **router))


def experts(model: nn.Module) -> Iterator[Step]:
    optimizer = adamw(model.parameters())
    for (words,) in DataLoader(TensorDataset(sentences()), TOTAL):
        total = 0.0
        for some in words.split(MICRO):
            loss = model(input_ids=some, labels=some).loss / (TOTAL // MICRO)
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(total, norm.item(), rates_of(optimizer))


# A frozen teacher in eval mode: its dropout would change what it teaches


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
        self.teacher = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 3))
        self.teacher.requires_grad_(False).eval()

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def distance(answers: Tensor, taught: Tensor) -> Tensor:
    return F.kl_div(answers.log_softmax(1), (3 * taught).softmax(1), reduction="batchmean")


class Teacher(Accumulation):
    @override
    def model(self) -> nn.Module:
        return Distilled()

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return distance(*model(batch[0]))


def teacher(model: Distilled) -> Iterator[Step]:
    optimizer = adamw(model.student.parameters())
    for x, _ in DataLoader(classified(), TOTAL):
        loss = distance(model.student(x), model.teacher(x))
        loss.backward()
        norm = clip_grad_norm_(model.student.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))


# from_pretrained, which returns a model in eval mode, with GPT-2's own dropout of 0.1


def save_pretrained(folder: Path) -> None:
    """Save the model that the next two tasks load."""
    torch.manual_seed(0)
    gpt2().save_pretrained(folder)


def seed_of(step: int, micro: int) -> int:
    """Return the seed of a microbatch's random numbers, from a run's own seed of 0."""
    return mix_seed(0, 3, step, micro)


class Pretrained(Lora):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    @override
    def model(self) -> nn.Module:
        loaded: Any = GPT2LMHeadModel.from_pretrained(self.folder)
        return loaded


def pretrained(model: nn.Module) -> Iterator[Step]:
    model.train()
    optimizer = adamw(model.parameters())
    for step, (words,) in enumerate(DataLoader(TensorDataset(sentences()), TOTAL)):
        total = 0.0
        for micro, some in enumerate(words.split(MICRO)):
            torch.manual_seed(seed_of(step, micro))
            loss = model(input_ids=some, labels=some).loss / (TOTAL // MICRO)
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(total, norm.item(), rates_of(optimizer))


# Gradient checkpointing, which transformers leaves out in eval mode; the model counts how often its block is computed


class Checkpointing(Pretrained):
    @override
    def model(self) -> nn.Module:
        loaded: Any = super().model()
        loaded.gradient_checkpointing_enable({"use_reentrant": False})
        self.computed = 0
        loaded.transformer.h[1].mlp.register_forward_pre_hook(self.count)
        return loaded

    def count(self, *_: Any) -> None:
        self.computed += 1


# Tied weights: the table of words is the last matrix, too; matrices decay, biases do not


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.mix, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, WORDS)
        self.head.weight = self.token.weight

    @override
    def forward(self, words: Tensor) -> Tensor:
        mixed, _ = self.mix(self.token(words))
        return self.head(self.norm(mixed))


class TiedWeights(Lora):
    @override
    def model(self) -> nn.Module:
        return Tied()

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (words,) = batch
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def tied_weights(model: nn.Module) -> Iterator[Step]:
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) == thick] for thick in (True, False))
    optimizer = adamw([{"params": matrices}, {"params": rest, "weight_decay": 0.0}])
    for (words,) in DataLoader(TensorDataset(sentences()), TOTAL):
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))


# Own groups: the head learns ten times as fast, and only the first layer decays; the rate falls to zero


class OwnGroups(Accumulation):
    @override
    def groups(self, model: Any) -> Iterable[Mapping[str, Any]]:
        return [
            {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.1},
            {"params": model[2].parameters(), "lr": 0.5},
        ]


def own_groups(model: Any) -> Iterator[Step]:
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.1},
            {"params": model[2].parameters(), "lr": 0.5},
        ],
        momentum=0.9,
    )
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=STEPS - 1)
    for x, y in DataLoader(classified(), TOTAL):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(loss.item(), norm.item(), rates_of(optimizer))
        schedule.step()


@dataclass(frozen=True)
class HandLoop:
    """A task, what its config says under `train`, and the loop for the same."""

    task: type[unipar.Task]
    loop: Loop
    train: Mapping[str, Any] = field(default_factory=lambda: {"optimizer": ADAMW, "clip": 1.0})

    def make_task(self, folder: Path) -> unipar.Task:
        """Return the task; `folder` has the model that two of them load."""
        return self.task(str(folder)) if issubclass(self.task, Pretrained) else self.task()

    def by_hand(self, task: unipar.Task) -> tuple[list[Step], nn.Module]:
        """Return the steps of the loop by hand on the task's model, and the model at the end."""
        torch.manual_seed(0)
        model: Any = task.model()
        return list(self.loop(model)), model


HAND_LOOPS: dict[str, HandLoop] = {
    "padding with -100": HandLoop(Padding, padding),
    "accumulation": HandLoop(
        Accumulation,
        accumulation,
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, "clip": 0.2},
    ),
    "warmup": HandLoop(
        Warmup, warmup, {"optimizer": ADAMW, "schedule": {"name": "cosine", "warmup": 3, "min_lr_ratio": 0.1}}
    ),
    "BatchNorm with augmentation": HandLoop(
        BatchNorm, batch_norm, {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "clip": 0.5}
    ),
    "LoRA": HandLoop(Lora, lora, {"optimizer": ADAMW, "clip": 0.01}),
    "two passes": HandLoop(TwoPasses, two_passes, {"optimizer": ADAMW, "clip": 0.5}),
    "mixture of experts": HandLoop(Experts, experts),
    "frozen teacher": HandLoop(Teacher, teacher, {"optimizer": ADAMW, "clip": 0.05}),
    "from_pretrained with dropout": HandLoop(Pretrained, pretrained),
    "gradient checkpointing": HandLoop(Checkpointing, pretrained),
    "tied weights": HandLoop(TiedWeights, tied_weights, {"optimizer": ADAMW | {"decay": "matrices"}, "clip": 0.5}),
    "own groups": HandLoop(
        OwnGroups,
        own_groups,
        {"optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}, "clip": 0.2, "schedule": {"name": "linear"}},
    ),
}
