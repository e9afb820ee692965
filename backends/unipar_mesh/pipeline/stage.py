"""One stage of a pipeline: the user's model with only some of its blocks, and the user's loss, both unchanged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unipar.backend import Fn
from unipar.distributed.device import set_generator_state
from unipar.errors import TaskError


class Arrival(NamedTuple):
    """Output of the last block of the stage before, with the state of the generator that draws its random numbers."""

    hidden: Tensor
    generator: Tensor | None
    leaf: Tensor | None = None
    """Tensor that gets the gradient, if not `hidden`: that may be cut along the sequence."""


@final
class StageLeft(Exception):
    """Control exception that carries the output of a stage's last block out of the loss."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@final
class Stage:
    """Hooks that make the loss run blocks `first` to `end` only.

    Earlier blocks give their argument back, except the last of them: it returns what `inlet` gives, the output that it
    had on its own stage. Behind the last own block the output goes to `outlet`. What the loss computes before has no
    effect, unless blocks also get it by other arguments (masks, positions), which every stage computes itself.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], first: int, end: int, tuples: Sequence[int] = ()
    ) -> None:
        """Take blocks `first` to `end`; `tuples` are the lengths of the tuples that blocks return, 0 for a tensor."""
        self.blocks, self.first, self.end = blocks, first, end
        self._tuples = tuples or [0] * len(blocks)
        self.is_first, self.is_last = first == 0, end == len(blocks)
        self.inlet: Callable[[], Arrival] | None = None
        """Source of the output of the last block before the own ones; None: there is none, as in the first stage."""

        self.outlet: Callable[[Tensor], None] | None = None
        """Receiver of the last own block's output, after which the loss goes on; None: the loss is left there."""

        self.widen: Callable[[Tensor], Tensor] | None = None
        """Function that gives the last absent block's output the size of a whole sequence, if the own blocks have a
        part of it: in an evaluation the loss goes on with it, though the result is not used."""

        self.repeats = False
        """Whether the function may run the blocks several times, or not at all, as metrics may."""

        self._modules = [model.get_submodule(name) for name in blocks]
        self._next = 0
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> Stage:
        """Put the hooks on: after the library's own, which must have run when the loss is left."""
        for number, block in enumerate(self._modules):
            if isinstance(block, FSDPModule) and not self.first <= number < self.end:
                self._undo.append(_without_hooks(block))
            hook = block.register_forward_pre_hook(self._before(number), prepend=True)
            self._undo.append(hook.remove)
            if not self.first <= number < self.end:
                self._skip(block, number)
        if not self.is_last:
            self._undo.append(self._modules[self.end - 1].register_forward_hook(self._behind).remove)
        return self

    def leave(self) -> None:
        """Take all hooks off."""
        while self._undo:
            self._undo.pop()()

    def run(self, fn: Fn, model: nn.Module, batch: Any) -> Any:
        """Return the output of the last own block; in the last stage, and with an outlet, what `fn` returns."""
        self._next = 0
        try:
            out = fn(model, batch)
        except StageLeft as left:
            return left.hidden
        if self._next != len(self.blocks) and not self.repeats:
            raise TaskError(
                f"parallel.pipeline cuts between blocks, and the loss must run all {len(self.blocks)}, once and in "
                f"order; it ran {self._next} of them"
            )
        return out

    def _skip(self, block: nn.Module, number: int) -> None:
        """Let an absent block return its argument, or what arrives, where its output would have the hidden states."""
        own = vars(block).get("forward")
        length = self._tuples[number]

        def return_argument(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_of_input(args, kwargs)
            if number == self.first - 1 and self.inlet is not None:
                hidden, generator, _ = self.inlet()
                if generator is not None:
                    set_generator_state(generator, hidden.device)
            if number == len(self.blocks) - 1 and self.widen is not None:
                hidden = self.widen(hidden)
            return (hidden, *[None] * (length - 1)) if length else hidden

        setattr(return_argument, _LEFT_OUT, True)
        block.forward = return_argument

        def restore() -> None:
            del block.forward
            if own is not None:
                block.forward = own

        self._undo.append(restore)

    def _before(self, number: int) -> Callable[..., Any]:
        def check_order(block: nn.Module, args: Any) -> None:
            if self.repeats and number == 0:
                self._next = 0
            if number != self._next:
                due = repr(self.blocks[self._next]) if self._next < len(self.blocks) else "no further block"
                raise TaskError(
                    "parallel.pipeline cuts between blocks, and the loss must run each once, in order; it ran "
                    f"{self.blocks[number]!r} where {due} was due: put blocks that belong together into one, or "
                    "leave parallel.pipeline out"
                )
            self._next += 1

        return check_order

    def _behind(self, block: nn.Module, args: Any, out: Any) -> None:
        hidden = hidden_of_output(out)
        if self.outlet is None:
            raise StageLeft(hidden)
        self.outlet(hidden)


def _without_hooks(block: nn.Module) -> Callable[[], None]:
    """Take all hooks off a block that does not run, and return what puts them back: FSDP2 would gather it."""
    hooks = {name: vars(block)[name] for name in ("_forward_pre_hooks", "_forward_hooks")}

    def restore() -> None:
        vars(block).update(hooks)

    vars(block).update({name: OrderedDict[int, Any]() for name in hooks})
    return restore


_LEFT_OUT = "_unipar_left_out"
"""Mark of a forward that stands for a block of another stage."""


def is_left_out(block: nn.Module) -> bool:
    """Return whether the stage whose hooks are on does without this block."""
    return hasattr(vars(block).get("forward"), _LEFT_OUT)


def hidden_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among a block's arguments: the first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise TaskError(
        "parallel.pipeline hands the first tensor that a block gets to the next stage, and a block got none: pass the "
        "hidden states to it as an argument of its own, or leave parallel.pipeline out"
    )


def hidden_of_output(out: Any) -> Tensor:
    """Return the hidden states in what a block returned: a tensor, or the first of a tuple."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(first, Tensor):
        raise TaskError(
            "parallel.pipeline hands a block's output to the next stage: a tensor, or the first of a tuple; a block "
            f"returned {type(first).__name__}: let it return the hidden states first, or leave parallel.pipeline out"
        )
    return first
