"""`offload_activations`: what autograd saves in a model's blocks waits in pinned host memory for their backward.

Copies run on a stream of their own: a block's tensors leave while the next block runs, and come back while the backward
of that one runs. The device holds those of two blocks. The last block's stay, as its backward comes first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unipar.distributed.accelerators import ACCELERATORS
from unipar.errors import ConfigError, TaskError
from unipar.prediction.terms import pinned_bytes

SMALLEST: Final = 1024
"""Bytes of the smallest memory that is moved: a copy of less costs more than it frees."""

_SMALLEST_PLANNED: Final = 16
"""The same in a plan, where microbatches of any size move the same tensors: all but numbers."""

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch's stubs do not have it  # pyright: ignore[reportPrivateUsage]
_unseen: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage] - modes of others have no part here
hooks_of_saved_tensors: Any = _autograd._top_saved_tensors_default_hooks
"""Function that returns the hooks of the innermost `saved_tensors_hooks`; None without one."""


def offload_activations(module: nn.Module, blocks: Sequence[str]) -> None:
    """Make the blocks' forwards move what autograd saves in them; raise ConfigError if there are fewer than two."""
    if len(blocks) < 2:
        raise ConfigError(
            f"model.offload: activations moves what a block saves while others run, and the model has {len(blocks)} "
            "blocks: name two or more in model.blocks or in the task's blocks(), or leave activations out"
        )
    offload = _ActivationOffload()
    for name in blocks:
        _surround_forward(module.get_submodule(name), offload, last=name == blocks[-1])


def _surround_forward(block: nn.Module, offload: _ActivationOffload, *, last: bool) -> None:
    surrounding = offload.last_block if last else offload.block
    inner = [block.forward]

    @wraps(inner[0])  # with what a recomputed forward says of itself
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner[0](*args, **kwargs)
        with surrounding(block):
            return inner[0](*args, **kwargs)

    forward.__dict__.setdefault("unipar_inner", inner)  # an engine may wrap what is inside
    forward.__dict__["unipar_saved"] = partial(offload.saved_in, block)
    block.forward = forward


@final
class _ActivationOffload:
    """Blocks of one model that are on their way to the host and back."""

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[int, _SavedMemory] = weakref.WeakValueDictionary()
        """Memory of which autograd has saved a tensor, by the address of its storage."""

        self.coming: _BlockCall | None = None
        """Call whose memory was asked back, and which no backward has waited for."""

        self._last: Callable[[], _BlockCall | None] = lambda: None
        self._calls: weakref.WeakSet[_BlockCall] = weakref.WeakSet()
        self._streams: dict[torch.device, _CopyStream] = {}

    def stream(self, device: torch.device) -> _CopyStream:
        """Return the stream for copies from and to a device."""
        if device not in self._streams:
            self._streams[device] = _CopyStream(device)
        return self._streams[device]

    @contextmanager
    def block(self, block: nn.Module) -> Generator[None]:
        """Context manager around a block's forward."""
        self.wait_for_coming()
        before = self._last()
        call = _BlockCall(self, block, before)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            yield
        call.copy_out()
        if before is not None:
            before.leave()
        self._last = weakref.ref(call)
        self._calls.add(call)

    @contextmanager
    def last_block(self, _: nn.Module) -> Generator[None]:
        """Context manager around the forward of the last block, of which nothing is moved."""
        self.wait_for_coming()
        yield
        if (before := self._last()) is not None:
            before.leave()

    def saved_in(self, block: nn.Module) -> Iterator[Tensor]:
        """Yield the memory of what calls of a block have saved, and that of the host which any may use next."""
        for call in [call for call in self._calls if call.block is block]:
            yield from call.memory()
        for stream in self._streams.values():
            yield from stream.unused()

    def wait_for_coming(self) -> None:
        """Wait, on the device, for copies whose backward has not come: their memory may be freed then."""
        if self.coming is not None:
            self.coming.wait()


@final
class _BlockCall:
    """One forward of a block, and what autograd has saved in it."""

    def __init__(self, offload: _ActivationOffload, block: nn.Module, before: _BlockCall | None) -> None:
        self._offload, self.block = offload, block
        self._tensors = [t for t in (*block.parameters(), *block.buffers()) if not is_traceable_wrapper_subclass(t)]
        self._before: Callable[[], _BlockCall | None] = (lambda: None) if before is None else weakref.ref(before)
        self._outer = hooks_of_saved_tensors(False)
        self._memories: list[_SavedMemory] = []
        self._events: list[tuple[_CopyStream, Any]] = []
        """Ends of the copies that the device has not waited for."""

        self._in_backward = False

    def memory(self) -> Iterator[Tensor]:
        """Yield the memory that it holds, on the device and on the host."""
        for memory in self._memories:
            yield from (t for t in (memory.device, memory.host) if t is not None)

    def pack(self, t: Tensor) -> Any:
        """Return what autograd keeps in a tensor's place."""
        with _unseen():
            if self._is_moved(t):
                memory = self._memory_of(t)
                memory.uses += 1
                return memory, t.dtype, t.shape, t.stride(), t.storage_offset()
        return t if self._outer is None else (self._outer[0](t),)

    def _is_moved(self, t: Tensor) -> bool:
        on_device = t.device.type in ACCELERATORS or isinstance(t, FakeTensor)
        if not on_device or t.layout != torch.strided or is_traceable_wrapper_subclass(t) or t.is_conj() or t.is_neg():
            return False
        if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
            return False
        storage = t.untyped_storage()
        if storage.nbytes() < (_SMALLEST_PLANNED if isinstance(t, FakeTensor) else SMALLEST):
            return False
        address = _address(storage)
        return all(_address(own.untyped_storage()) != address for own in self._tensors)

    def _memory_of(self, t: Tensor) -> _SavedMemory:
        storage = t.untyped_storage()
        memory = self._offload.known.get(_address(storage))
        if memory is None or memory.source() is not storage or memory.version != t._version:
            memory = _SavedMemory(t, self._offload.stream(t.device))
            self._offload.known[_address(storage)] = memory
        if memory not in self._memories:
            self._memories.append(memory)
        return memory

    def copy_out(self) -> None:
        """Begin to copy to the host what the block has saved."""
        leaving = [memory for memory in self._memories if memory.host is None]
        with _unseen():
            for memory in leaving:
                memory.check_unchanged()
            self._copy([(memory, memory.take_host(), memory.on_device()) for memory in leaving])

    def leave(self) -> None:
        """Free the device's memory when it has been copied."""
        self.wait()
        for memory in self._memories:
            memory.device = None

    def come(self) -> None:
        """Begin to copy back what backward needs."""
        self._offload.wait_for_coming()
        coming = [memory for memory in self._memories if memory.device is None and memory.uses > 0]
        self._copy([(memory, memory.take_device(), memory.on_host()) for memory in coming])
        self._offload.coming = self

    def wait(self) -> None:
        """Let the device wait until the copies have ended."""
        for stream, event in self._events:
            stream.wait(event)
        self._events.clear()
        if self._offload.coming is self:
            self._offload.coming = None

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor in whose place autograd has kept this."""
        if isinstance(kept, Tensor):
            return kept
        if len(kept) == 1:
            return self._outer[1](kept[0])
        memory, dtype, shape, stride, offset = kept
        if not self._in_backward:
            self._in_backward = True
            self.come()
            self.wait()
            if (before := self._before()) is not None:
                before.come()
        if memory.device is None:  # in a second backward, or if another block's has not come
            self._copy([(memory, memory.take_device(), memory.on_host())])
            self.wait()
        elements = memory.on_device().view(dtype)
        memory.uses -= 1
        if memory.uses <= 0:
            memory.device = None
        return elements.as_strided(shape, stride, offset)

    def _copy(self, copies: Sequence[tuple[_SavedMemory, Tensor, Tensor]]) -> None:
        """Begin copies to the second from the third."""
        for stream in {memory.stream for memory, _, _ in copies}:
            of_stream = [(to, source) for memory, to, source in copies if memory.stream is stream]
            self._events.append((stream, stream.copy(of_stream)))


@final
class _SavedMemory:
    """Memory of which autograd has saved tensors, on the device or on the host."""

    def __init__(self, t: Tensor, stream: _CopyStream) -> None:
        self.source = weakref.ref(t.untyped_storage())
        self.stream, self._place = stream, t.device
        elements = t.untyped_storage().nbytes() // t.element_size()
        self.device: Tensor | None = t.detach().as_strided((elements,), (1,), 0)
        """All elements in the device's memory; None: they have left."""

        self.host: Tensor | None = None
        self.uses = 0
        """Tensors that backward has not asked for."""

        self.version = t._version

    def check_unchanged(self) -> None:
        """Raise TaskError if a tensor was changed after it was saved, as torch does in backward."""
        assert self.device is not None
        if self.device._version != self.version:
            raise TaskError(
                f"a tensor of {self.device.numel()} elements that backward needs was changed in place after it was "
                "saved; torch itself raises an error in its backward, and with model.offload: none says where"
            )

    def on_device(self) -> Tensor:
        """Return the elements in the device's memory."""
        assert self.device is not None
        return self.device

    def on_host(self) -> Tensor:
        """Return their copy on the host."""
        assert self.host is not None
        return self.host

    def take_host(self) -> Tensor:
        """Return memory of the host for a copy; the next use of it is after this one's, on the same stream."""
        there = self.on_device()
        host = self.stream.take_host(there.nbytes)
        weakref.finalize(self, self.stream.give_host, host).atexit = False
        self.host = host[: there.nbytes].view(there.dtype)
        return self.host

    def take_device(self) -> Tensor:
        """Return memory of the device for a copy."""
        there = self.on_host()
        self.device = torch.empty(there.shape, dtype=there.dtype, device=self._place)
        return self.device


@final
class _CopyStream:
    """Stream on which copies run beside the computation; tensors without memory have none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        self._unused: dict[int, list[Tensor]] = {}
        """Pinned memory without a use, by its bytes."""

    def take_host(self, size: int) -> Tensor:
        """Return pinned memory of at least `size` bytes.

        torch would hand out memory again only when copies have ended, while the host is ahead of them.
        """
        size = size if self._stream is None else pinned_bytes(size)
        unused = self._unused.get(size)
        return unused.pop() if unused else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_host(self, host: Tensor) -> None:
        """Keep pinned memory for its next use; a plan has one for each."""
        if self._stream is not None:
            self._unused.setdefault(host.nbytes, []).append(host)

    def unused(self) -> Iterator[Tensor]:
        """Yield pinned memory without a use."""
        for each in self._unused.values():
            yield from each

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copy from the second to the first when all that computes now has ended; return the event of the copies' end.

        The memory is the computing stream's: that one waits for the event before memory is used, or used again.
        """
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the computing stream wait for an event."""
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)


def _address(storage: torch.UntypedStorage) -> int:
    """Return what identifies a storage while it lives; fake tensors have no address."""
    return getattr(storage, "_cdata")  # noqa: B009
