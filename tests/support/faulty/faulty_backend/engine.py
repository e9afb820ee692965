"""DDP as anybody writes it, and one thing wrong with it: each fault is a few lines where real code has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

from tests.support.healthy_engines import HealthyByHand, HealthyDDP
from unipar.backend import Engine, Factor, Holding, LossFn, Mark, Micro, Part, Piece, Read, Region, Step
from unipar.backend.engine import DelegatingEngine
from unipar.config import Config
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.distributed.world import World
from unipar.engines.gradients import clip_gradients


@final
class OtherStart(HealthyDDP):
    """Something in its library begins anew."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        with torch.no_grad():
            self.trained[-1].add_(1e-6)


@final
class NoAveraging(HealthyDDP):
    """A communication hook that sums, and nobody divides."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.ddp.register_comm_hook(None, _summed)


def _first(done: Any) -> Tensor:
    return done.value()[0]


def _summed(state: Any, bucket: Any) -> Any:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(_first)


_summed.__annotations__.clear()  # DDP reads them, and takes no strings


@final
class AveragingTwice(HealthyDDP):
    """By hand, after the library has done it."""

    @override
    def finish_reduction(self) -> None:
        for p in self.trained:
            assert p.grad is not None
            p.grad.div_(self.world.size)


class _UntilNorm(HealthyByHand):
    """Each rank's own gradient is in `norm`'s hands."""

    @override
    def finish_reduction(self) -> None:
        pass


@final
class ClipPerRank(_UntilNorm):
    """Clipped before the ranks are averaged."""

    @override
    def norm(self) -> Tensor:
        norm = clip_grad_norm_(self.trained, self.limit)
        self.average()
        return norm


@final
class ClipPerRankUnsaid(_UntilNorm):
    """The same, and the norm that is told is that of the whole."""

    @override
    def norm(self) -> Tensor:
        clip_grad_norm_(self.trained, self.limit)
        self.average()
        return clip_gradients(self.trained, float("inf"))


@final
class ClipOwnPart(HealthyDDP):
    """Each rank takes the norm of the parameters that it would hold."""

    @override
    def norm(self) -> Tensor:
        mine = self.trained[self.world.rank :: self.world.size]
        total = clip_gradients(mine, float("inf"))
        for p in self.trained:
            assert p.grad is not None
            p.grad.mul_((self.limit / (total + 1e-6)).clamp(max=1.0))
        return total


@final
class DividedTwice(HealthyDDP):
    """The loss is divided by the number of microbatches, though its weight says so already."""

    passes = 1

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        self.passes = micros
        return super().sync(micros, last=last)

    @override
    def backward(self, loss: Tensor) -> None:
        (loss / self.passes).backward()


@final
class SchedulePerProcess(HealthyDDP):
    """As a scheduler does that is stepped once for each process."""

    done = 0

    @override
    def update(self) -> None:
        self.done += 1
        assert self.config.train.steps is not None
        ahead = self.done * self.world.size - 1
        self.rates.set(self.optimizer, self.config.train.schedule.factor(ahead, self.config.train.steps))
        super().update()


@final
class SameSamples(HealthyDDP):
    """Every rank reads what the first does."""

    plans = staticmethod(MicrobatchLoader.plans)

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)

        def first(loader: Any, start: int) -> Iterator[Any]:
            loader.rank = 0
            return SameSamples.plans(loader, start)

        MicrobatchLoader.plans = first  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def close(self) -> None:
        MicrobatchLoader.plans = SameSamples.plans  # pyright: ignore[reportAttributeAccessIssue]


@final
class GroupLeftOut(HealthyDDP):
    """The optimizer was made before the last group was added."""

    @override
    def update(self) -> None:
        left = self.base.param_groups.pop()
        self.base.step()
        self.base.param_groups.append(left)
        self.base.zero_grad()


@final
class StaleGradient(HealthyDDP):
    """Nobody sets gradients to zero."""

    @override
    def update(self) -> None:
        self.base.step()


@final
class Bf16Reduction(HealthyDDP):
    """Half the traffic, in an fp32 run."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.ddp.register_comm_hook(None, _in_bf16)


def _in_bf16(state: Any, bucket: Any) -> Any:
    buffer: Tensor = bucket.buffer()
    work: Any = dist.all_reduce(buffer.to(torch.bfloat16).div_(dist.get_world_size()), async_op=True)

    def back(done: Any) -> Tensor:
        return buffer.copy_(_first(done))

    return work.get_future().then(back)


_in_bf16.__annotations__.clear()


@final
class NotReduced(HealthyDDP):
    """The last microbatch is in no_sync too."""

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()


@final
class LastGradientLost(HealthyDDP):
    """The forward is there, what comes back of it is not."""

    last = False

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        self.last = last
        return super().sync(micros, last=last)

    @override
    def backward(self, loss: Tensor) -> None:
        (loss * 0.0 if self.last else loss).backward()


@final
class WrongModule(HealthyDDP):
    """One module of the second rank computes something else."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        if world.rank == 1:
            part.module.get_submodule("blocks.1.up").register_forward_hook(_more)


def _more(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return out * 1.01


@final
class Dies(HealthyDDP):
    """The second rank, with its process."""

    @override
    def update(self) -> None:
        if self.world.rank == 1:
            os._exit(3)
        super().update()


@final
class LastMicrobatchDropped(DelegatingEngine):
    """A loop that ends one early."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(HealthyDDP(part, config, world))

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        return self.inner.step(fn, micros[:-1], factor, mark)


@final
class HiddenBuffer(HealthyDDP):
    """An engine with five million bytes that its holdings do not list, and three million that they list three times."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.hidden, self.thrice = torch.ones(1_250_000), torch.ones(750_000)

    @override
    def extra_holdings(self) -> Iterator[Holding]:
        yield Holding("buffers", "flat", self.thrice)
        yield Holding("masters", "w", self.thrice.view(750, 1000))
        yield Holding("masters", "v", self.thrice)
        yield from super().extra_holdings()


@final
class Nameless(HealthyDDP):
    """In a watched step the second rank cannot say what it holds."""

    asked = 0

    @override
    def extra_holdings(self) -> Iterator[Holding]:
        self.asked += 1
        if self.asked > 3 and dist.get_rank() == 1:
            raise ArithmeticError("it cannot be said\nof any tensor")
        yield from super().extra_holdings()


@final
class MomentsForgotten(DelegatingEngine):
    """A state of which the weights alone are loaded."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(HealthyDDP(part, config, world))

    @override
    def restore(self, read: Read) -> None:
        self.inner.restore(_Weights(read))


@final
class _Weights(Read):
    def __init__(self, read: Read) -> None:
        self.read = read

    @override
    def __call__(self, name: str, kind: str, where: Region) -> Tensor:
        return self.read(name, kind, where)

    @override
    def kinds(self, name: str) -> set[str]:
        return {"weight"}

    @override
    def shape(self, name: str, kind: str) -> tuple[int, ...]:
        return self.read.shape(name, kind)


@final
class StaleAverages(DelegatingEngine):
    """A second copy of the weights, which nothing updates after the third step, is what it shows to be averaged."""

    steps = 0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(HealthyDDP(part, config, world))
        self.copies: list[Piece] = []

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        self.steps += 1
        return self.inner.step(fn, micros, factor, mark)

    @override
    def full_weights(self) -> Iterator[Piece]:
        if self.steps <= 3:
            self.copies = [replace(p, tensor=p.tensor.clone()) for p in self.inner.full_weights()]
        yield from self.copies


class FirstLeftFp8(DelegatingEngine):
    """A library puts its own linear layer in the place of one, as those for inference do."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        module: Any = part.module
        old = module.blocks[1].up
        new = nn.Linear(old.in_features, old.out_features, device="meta")
        new.weight, new.bias = old.weight, old.bias
        module.blocks[1].up = new
        super().__init__(HealthyDDP(part, config, world))


class LateLeftFp8(DelegatingEngine):
    """A layer turns back into a plain one after the second step, without a word."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        self.module: Any = part.module
        self.steps = 0
        super().__init__(HealthyDDP(part, config, world))

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        self.steps += 1
        if self.steps == 3:
            self.module.blocks[0].down.__class__ = nn.Linear
        return self.inner.step(fn, micros, factor, mark)


KINDS: dict[str, Callable[[Part, Config, World], Engine]] = {
    "none": HealthyDDP,
    "other-start": OtherStart,
    "no-averaging": NoAveraging,
    "averaging-twice": AveragingTwice,
    "clip-per-rank": ClipPerRank,
    "clip-per-rank-unsaid": ClipPerRankUnsaid,
    "clip-own-part": ClipOwnPart,
    "divided-twice": DividedTwice,
    "schedule-per-process": SchedulePerProcess,
    "same-samples": SameSamples,
    "group-left-out": GroupLeftOut,
    "last-microbatch-dropped": LastMicrobatchDropped,
    "stale-gradient": StaleGradient,
    "bf16-reduction": Bf16Reduction,
    "not-reduced": NotReduced,
    "last-gradient-lost": LastGradientLost,
    "wrong-module": WrongModule,
    "dies": Dies,
    "hidden-buffer": HiddenBuffer,
    "nameless": Nameless,
    "moments-forgotten": MomentsForgotten,
    "stale-averages": StaleAverages,
    "first-left-fp8": FirstLeftFp8,
    "late-left-fp8": LateLeftFp8,
}
