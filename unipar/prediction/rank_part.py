"""`RankPart`: what one rank has of a model that is split along axes of the mesh, as a fake run can execute it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unipar.distributed.mesh import Mesh


class RankPart(ABC):
    """Part of a model without values, in one process without peers: its parameters, and a microbatch's way through it.

    The model is that of all parts: it is this one's between `placed` and its end. Further hooks on modules, such as a
    library's or a recorder's, are put on after `placed` and before `armed`.
    """

    model: nn.Module
    blocks: Sequence[str]
    """Names of the blocks that this rank has; layers of experts in one come before it."""

    experts_of_blocks: frozenset[str] = frozenset()
    """Names of those that are layers of experts, of which ranks of the data have different ones."""

    routing: Literal["even", "worst"] = "even"
    """Rows that the rank's experts get: as many as it sends, or those of all ranks."""

    logged_of_experts: Sequence[int] = ()
    """Bytes that all ranks combine at a logged step to count tokens of experts, of each collective."""

    mesh: Mesh
    """Mesh of the ranks that train on the same samples, with this one's seat."""

    left_out: frozenset[str] = frozenset()
    """Names of blocks of this rank that are not in the model for now, because equal ones stand for them."""

    stage: int = 0
    """Stage of the pipeline; a rank that has several of them has a part for each."""

    alike: Sequence[int] = ()
    """For each stage the one that runs in its place, where a rank has several stages."""

    halves: bool = False
    """True if gradients of weights are computed apart from those of inputs, after them."""

    received: int = 0
    """Bytes of buffers in which the last microbatch has arrived, if they stay; in none else it is an activation."""

    keep: Callable[[Tensor], None] | None = None
    """Function to be told of tensors that are there before and after a microbatch."""

    sent_on: int = 0
    """Bytes of hidden states that the last microbatch has sent to the stage behind."""

    sent_back: int = 0
    """Bytes of their gradient that it has sent to the stage before."""

    proved: bool = False
    """True if the set-up computes gradients of the whole model on rank 0, and of all parts, without autocast."""

    stages_of: Mapping[str, int]
    """Number of stages that use a parameter, by its name, where several do."""

    @abstractmethod
    def placed(self) -> AbstractContextManager[None]:
        """Context manager: the model has this rank's parameters, and a process group is there."""

    @abstractmethod
    def armed(self) -> AbstractContextManager[None]:
        """Context manager: blocks compute on parts and communicate, as they do in training."""

    def forward(self, call: nn.Module, fn: Callable[[Any, Any], Any], opaque: Any) -> Any:
        """Run a microbatch, given as engines give it to `call`; return what its backward needs."""
        return call(fn, opaque)

    def backward(self, out: Any) -> None:
        """Run the backward of a microbatch, or its first half."""
        out.backward()

    def backward_of_weights(self, out: Any) -> None:
        """Run the second half of the backward of a microbatch."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Let go of what stays until all microbatches have ended."""
        self.keep = None
