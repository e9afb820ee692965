"""Three parts that one loss goes through, and the same written out by hand in one process with one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

import unipar
from tests.conformance.gan import Net, Pair, Points, apply
from unipar.data.dataset import SeededDataset
from unipar.data.order import SampleOrder, split_batch
from unipar.utils.seeding import mix_seed, seed_all

if TYPE_CHECKING:
    from tests.conformance.cases import Case
    from tests.conformance.plain import Result

PARTS = ("encoder", "middle", "decoder")


class Chain(unipar.Task):
    """An autoencoder of points; the decoder sees what the encoder put out beside what the middle made of it."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        self.settings: dict[str, Any] = {"norm": norm, "dropout": dropout}

    @override
    def model(self) -> dict[str, Any]:
        widths = {"encoder": (2, 4), "middle": (4, 3), "decoder": (7, 2)}
        return {name: Net(*widths[name], **self.settings) for name in PARTS}

    @override
    def data(self) -> Any:
        return Points()

    @override
    def train(self, run: unipar.Run) -> None:
        for local_batch in run.batches():
            run.step_through(
                local_batch, {"encoder": self.encode, "middle": self.halfway}, part="decoder", loss=self.decode
            )

    @override
    def loss(self, model: Any, batch: Any) -> Tensor:
        raise AssertionError("no part has a loss of its own")

    def encode(self, model: Any, batch: Pair, outputs: Mapping[str, Any]) -> Any:
        return {"code": apply(model, batch[1:]), "named": "code"}

    def halfway(self, model: Any, batch: Pair, outputs: Mapping[str, Any]) -> Any:
        return apply(model, outputs["encoder"]["code"])[0]

    def decode(self, model: Any, batch: Pair, outputs: Mapping[str, Any]) -> Tensor:
        (code,) = outputs["encoder"]["code"]
        (made,) = apply(model, [F.pad(code, (0, 3)) + F.pad(outputs["middle"], (4, 0))])
        return (made.float() - batch[1].float()).square().mean() if made.itemsize < 4 else F.mse_loss(made, batch[1])


def train_chain_by_hand(case: Case, result: Result, size: int) -> Result:
    """All parts in one graph, each with its own optimizer and clip."""
    from tests.conformance.cases import dtype_of
    from tests.conformance.plain import ONE, optimizer_of

    config, task, dtype = case.config(ONE, size), Chain(**case.kwargs), dtype_of(case)
    seed = config.train.seed
    seed_all(seed)
    parts: dict[str, Any] = {name: module.to(dtype) for name, module in task.model().items()}
    optimizers = {
        name: optimizer_of(config.of_part(name), None, list(part.parameters())) for name, part in parts.items()
    }
    seen, sizes = SeededDataset(Points(), seed), config.batch.settle(size)
    order = SampleOrder(64, config.batch.total or 0, seed, True, config.data.last_batch)
    for step, (epoch, indices) in zip(range(config.train.steps or 0), order.batches(0), strict=False):
        cuts = [mine for micro in split_batch(indices, sizes.accumulate, size) for mine in micro]
        whole = 0.0
        for i, mine in enumerate(cuts if case.micro else [indices]):
            batch: Any = [t.to(dtype) for t in task.collate([seen[epoch, k] for k in mine])]
            outputs: dict[str, Any] = {}
            for number, (name, fn) in enumerate(zip(PARTS, (task.encode, task.halfway, task.decode), strict=True)):
                seed_all(mix_seed(seed, 3, step, i, number))
                outputs[name] = fn(parts[name], batch, outputs)
            loss = outputs["decoder"] * (len(mine) / len(indices))
            loss.backward()
            whole += loss.item()
        norms = [float(clip_grad_norm_(part.parameters(), 0.1)) for part in parts.values()]
        assert min(norms) > 0.1, "the clip does not bite"
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        result.losses.append(whole)
        result.norms.append(math.hypot(*norms))
        for name in reversed(PARTS):
            result.parts.setdefault(name, []).append(whole if name == "decoder" else 0.0)
    result.params = {f"{part}.{n}": p.detach().flatten() for part, m in parts.items() for n, p in m.named_parameters()}
    return result
