"""Collectives without peers, and moments of a step under a library, each with the bytes of torch's tensors."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d  # pyright: ignore[reportPrivateUsage] - no public way
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from unipar.memory.recording.bytes_sent_recorder import bytes_of_call, collective_of
from unipar.memory.sources.profiler import ProfilerSource
from unipar.training.fake_run.step_recorder import TellBackward

_work_of_future: Any = vars(_distributed_c10d)["_create_work_from_future"]
"""Function for which torch has no public name."""


class Mark(NamedTuple):
    """A moment of a step, by the names of a timeline."""

    phase: str
    what: str
    block: int = -1


@final
class PretendedRanks(TorchDispatchMode):
    """Mode in which collectives give what ranks without values would give, and copy what they send if gloo would."""

    def __init__(self, *, staged: bool) -> None:
        super().__init__()
        self._staged = staged

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func._schema.name == "fsdp::chunk_cat" and not self._staged:
            kwargs["out"].zero_()
            return None  # on CUDA it needs no copies of what it pads
        if func._schema.name == "aten::add_" and args[0].dtype != args[1].dtype:
            return args[0]  # on the CPU it would make a copy in the wider dtype, for a moment
        kind = collective_of(func._schema.name)
        if kind in ("all_gather", "reduce_scatter") and func._schema.name.startswith("c10d::"):
            copied = torch.empty(bytes_of_call(args, None) if self._staged else 0, dtype=torch.uint8)
            for tensor in tree_leaves(args[0]):
                tensor.zero_()  # of other ranks nothing has come
            del copied
        if func._schema.name != "c10d::allreduce_":
            return func(*args, **(kwargs or {}))
        for tensor in args[0]:
            tensor.mul_(dist.get_world_size())  # all ranks have this one's values
        future: Any = torch.futures.Future()
        future.set_result(list(args[0]))  # DDP takes the sum from there, where torch's own pretence has nothing
        return args[0], _work_of_future(future).boxed()


class SeenSpan(NamedTuple):
    """Bytes between a moment and the next, beyond those at the first moment of all."""

    mark: Mark
    most: int
    allocated: int | None
    """Most bytes right after an allocation; None: there was none."""

    first: int


@final
class StepSpans:
    """Moments of the last microbatch of a step, noted by hooks before and behind those of a library."""

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._source: ProfilerSource | None = None
        self._marks: list[Mark] = []
        self._phase = "forward"
        root.register_forward_hook(self._returning, prepend=True)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._called("reach", "leave", number), prepend=True, with_kwargs=True)
            block.register_forward_pre_hook(self._called("enter", "finish", number), with_kwargs=True)
            block.register_forward_hook(self._returned("finish", "reach", number), prepend=True)
            block.register_forward_hook(self._returned("leave", "enter", number))

    def mark(self, phase: str) -> None:
        """Note that a phase begins."""
        self._phase = phase
        self._note("begin")

    @contextmanager
    def record(self) -> Generator[list[SeenSpan]]:
        """Context manager: yield a list that holds the last microbatch's spans after exit."""
        spans: list[SeenSpan] = []
        self._source = source = ProfilerSource()
        self._marks.clear()
        source.begin()
        yield spans
        self.mark("steady")
        source.end()
        self._source = None
        seen = source.collect_events()
        last = max(number for number, mark in enumerate(self._marks) if mark[:2] == ("forward", "begin"))
        ats = [mark.at for mark in seen.marks]
        levels = [seen.base, *(int(event["live"]) for event in seen.events)]
        grown = [False, *(int(event["size"]) > 0 for event in seen.events)]
        for number in range(last, len(self._marks)):
            begin = ats[number]
            end = ats[number + 1] if number + 1 < len(ats) else begin
            after = [levels[at] for at in range(begin + 1, end + 1) if grown[at]]
            spans.append(
                SeenSpan(
                    self._marks[number],
                    max(levels[begin : end + 1]) - levels[0],
                    max(after) - levels[0] if after else None,
                    levels[begin] - levels[0],
                )
            )

    def _note(self, what: str, block: int = -1) -> None:
        if self._source is not None:
            self._marks.append(Mark(self._phase, what, block))
            self._source.mark(what)

    def _called(self, before: str, behind: str, block: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._note(before, block)
            wanted = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
            if not wanted:
                return None
            passed: Any = TellBackward.apply(lambda: self._note(behind, block), *wanted)
            made = {id(x): y for x, y in zip(wanted, passed, strict=True)}

            def replaced(x: Any) -> Any:
                return made.get(id(x), x)

            return tree_map(replaced, (args, kwargs))

        return hook

    def _returned(self, before: str, behind: str, block: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self._note(before, block)

            def arrived(gradient: Tensor) -> None:
                self._note(behind, block)

            if out.requires_grad:
                out.register_hook(arrived)

        return hook

    def _returning(self, module: nn.Module, args: Any, out: Tensor) -> None:
        if not out.requires_grad:
            return

        def arrived(gradient: Tensor) -> None:
            variable: Any = torch.autograd.Variable
            engine = variable._execution_engine
            engine.queue_callback(lambda: self._note("finish"))  # before what a library does in the end

        out.register_hook(arrived)
