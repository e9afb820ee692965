"""Tasks whose batches are counted in tokens; and their global batches, filled one sample after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler
from typing_extensions import override

from tests.conformance.tasks import Batch, Plain, Sentences, to_float32, token_mean


class Counted(Plain):
    """A mean over tokens of samples of any length; a batch is as wide as its longest one."""

    @override
    def length(self, sample: Any) -> int:
        return sample[1]

    @override
    def collate(self, samples: list[Any]) -> Batch:
        longest = max(2, *(length for _, length in samples))  # two ranks of `context` cut what is two tokens wide
        return Batch(torch.stack([t[: longest + 1] for t, _ in samples]), torch.tensor([n for _, n in samples]))

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        return token_mean(model(batch.tokens[:, :-1]), batch)

    @override
    def metrics(self, model: Any, batch: Batch) -> Mapping[str, Any]:
        return {"loss": self.loss(model, batch)}


class LateTokens(Counted):
    """A mean over the tokens behind the first of each sample, so that samples of one token count for nothing."""

    @override
    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = to_float32(model(batch.tokens[:, :-1]))
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:], reduction="none")
        place = torch.arange(losses.shape[1], device=losses.device)
        counts = (place > 0) & (place < batch.lengths[:, None])
        return (losses * counts).sum() / counts.sum()

    @override
    def weight(self, batch: Batch) -> Tensor:
        return (batch.lengths - 1).sum()


class Picked(Counted):
    """Samples that a sampler of its own picks, some several times, by a generator of its own."""

    @override
    def data(self) -> Any:
        often = [1.0 + i % 3 for i in range(self.count)]
        sampler = WeightedRandomSampler(often, 40, generator=torch.Generator().manual_seed(3))
        return DataLoader(Sentences(self.count), sampler=sampler, collate_fn=self.collate)


def fill_batches(
    length: Callable[[int], int], order: Callable[[int], list[int]], tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield (epoch, indices) of global batches of at most so many tokens."""
    epoch = 0
    while True:
        batch: list[int] = []
        for i in order(epoch):
            if sum(map(length, batch)) + length(i) > tokens:
                yield epoch, batch
                batch = []
            batch.append(i)
        yield epoch, batch
        epoch += 1
