"""Base of engines whose wrapper must know in advance whether the loss leaves parameters unused, as DDP must."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from unipar.backend import Holding, Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError


class LateWrappedEngine(WrapperEngine):
    """Base of engines whose wrapper must know in advance whether the loss leaves parameters unused.

    The first step runs without the wrapper: this class reduces its gradients, and sees which parameters the loss
    uses. Then the library wraps the model with the right setting.
    """

    find_unused_parameters: bool | None = None
    """Setting of the wrapper; None until the first step has shown whether it is needed."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self.backend = config.backend
        self.names = {id(p): n for n, p in part.module.named_parameters()}
        self.divisor = float(world.size)
        self.sent_dtype: torch.dtype | None = None
        """Dtype in which the first step's gradients are sent; None: their own."""

        self.syncs_each = False
        """Whether microbatches before the last of a step are reduced, too."""

        self._used = [0] * len(self.trained)
        """Backwards of the first step in which each parameter got a gradient; DDP reduces in the last one."""

        self._backwards = 0
        self._counters = [self._count_backwards(i, p) for i, p in enumerate(self.trained) if p.requires_grad]
        self._wrapped_steps = 0
        self._buckets: list[StorageWeakRef] = []

    @abstractmethod
    def wrap(self, *, find_unused_parameters: bool) -> nn.Module:
        """Return the model wrapped by the library."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Context manager: backward does not reduce gradients inside it."""

    def _count_backwards(self, index: int, p: nn.Parameter) -> RemovableHandle:
        def count(_: Tensor) -> None:
            self._used[index] += 1

        return p.register_post_accumulate_grad_hook(count)

    @override
    @final
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any] | None:
        self._backwards = micros
        return None if last or self.find_unused_parameters is None or self.syncs_each else self.no_sync()

    @override
    @final
    def finish_reduction(self) -> None:
        if self.find_unused_parameters is None:
            self._reduce_by_hand()
        elif not self.find_unused_parameters:
            unused = next((p for p in self.trained if p.grad is None), None)
            if unused is not None:
                raise TaskError(
                    f"the loss does not use the parameter {self.names[id(unused)]!r} in this step, though it used all "
                    f"in the first: set options.{self.backend}.find_unused_parameters: true, or use it times 0.0"
                )

    def _reduce_by_hand(self) -> None:
        always = [used == self._backwards for used in self._used]  # the last microbatch may leave out others
        always = self.world.sum(torch.tensor(always, dtype=torch.float32, device=self.world.device))
        used = torch.tensor([p.grad is not None for p in self.trained], dtype=torch.float32, device=self.world.device)
        self.world.sum(used)
        for p, ranks in zip(self.trained, used.tolist(), strict=True):
            if ranks:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                sent = grad if self.sent_dtype is None else grad.to(self.sent_dtype)
                p.grad = self.world.sum(sent.div_(self.world.size)).to(grad.dtype)
        self._unused = bool((always < self.world.size).any())

    @override
    @final
    def update(self) -> None:
        if self.find_unused_parameters is not None and self._wrapped_steps < 2:  # DDP rebuilds its buckets once
            self._wrapped_steps += 1
            storages = {p.grad.untyped_storage().data_ptr(): p.grad for p in self.trained if p.grad is not None}
            self._buckets = [StorageWeakRef(grad.untyped_storage()) for grad in storages.values()]
        super().update()
        if self.find_unused_parameters is None:
            self.settle(find_unused_parameters=self._unused)
        elif self._wrapped_steps > 0:
            self.syncs_each = False

    @override
    @final
    def extra_holdings(self) -> Iterator[Holding]:
        """Yield DDP's buckets, which stay in memory after the gradients, views of them, are freed."""
        untyped_storage: Any = torch.UntypedStorage
        for i, bucket in enumerate(self._buckets):
            if (storage := untyped_storage._new_with_weak_ptr(bucket.cdata)) is not None:
                yield Holding("gradients", f"bucket {i}", _storage_as_tensor(storage))
        for name, tensor in self.held_by_hook():
            yield Holding("communication", name, tensor)

    def held_by_hook(self) -> Iterable[tuple[str, Tensor]]:
        """Return the tensors that a communication hook keeps, with their names."""
        return ()

    @final
    def settle(self, *, find_unused_parameters: bool) -> None:
        """Wrap the model with this setting."""
        self.find_unused_parameters = find_unused_parameters
        for counter in self._counters:
            counter.remove()
        self._counters.clear()
        self.wrapped = self.wrap(find_unused_parameters=find_unused_parameters)


def _storage_as_tensor(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
