"""`compile_parts`: a model on tensors without memory under torch.compile, with the memory of what it compiles to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from unipar.config.sections.model import Compile
from unipar.errors import TaskError
from unipar.model.transforms import parts_to_compile
from unipar.profiling.compiling import graphs_compiled

COMPILERS: Final = ("inductor", "aot_eager", "aot_eager_decomp_partition", "eager")
"""Backends of torch.compile whose code can run on tensors without memory."""

_MOST_STEPS: Final = 4
"""Steps after which nothing should be compiled any more."""

_MOST_COMPILED: Final = 64
"""Times that one function may be compiled: for each size of microbatches, and with fewer blocks."""


@contextmanager
def compile_parts(model: nn.Module, blocks: Sequence[str], settings: Compile) -> Generator[None]:
    """Context manager: the model's parts are compiled, as in training; kernels that Inductor writes do nothing.

    What Inductor allocates between them is as in training: its own code does it.
    """
    parts = parts_to_compile(model, blocks, settings)
    if settings.backend not in COMPILERS:
        *others, last = COMPILERS
        raise TaskError(
            f"what {settings.backend} compiles cannot run without values; {', '.join(others)} and {last} can"
        )
    before = [part.__dict__.get("forward") for part in parts]
    with ExitStack() as stack:
        for change in _changes(settings.backend):
            stack.enter_context(change)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch looks at what fake tensors have not, such as gradients
        stack.callback(_forget_compiled)
        try:
            for part in parts:
                part.forward = torch.compile(part.forward, backend=settings.backend, dynamic=False)
            yield
        finally:
            for part, forward in zip(parts, before, strict=True):
                part.__dict__.pop("forward", None)
                if forward is not None:
                    part.forward = forward


def run_until_compiled(run: Callable[[], None]) -> None:
    """Run a step until nothing is compiled any more; raise TaskError if that does not end."""
    for _ in range(_MOST_STEPS):
        before = graphs_compiled()
        run()
        if graphs_compiled() == before:
            return
    raise TaskError(
        f"the model is compiled again in each of {_MOST_STEPS} steps, so that it cannot be planned; set model.compile: "
        "false"
    )


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error of torch's compiler, with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _changes(backend: str) -> Generator[Any]:
    """Yield what torch's compiler needs to run its code on tensors without memory, and to keep none of it."""
    dynamo: Any = import_module("torch._dynamo.config")
    yield dynamo.patch(recompile_limit=_MOST_COMPILED, automatic_dynamic_shapes=False, fail_on_recompile_limit_hit=True)
    if backend != "inductor":
        return
    inductor: Any = import_module("torch._inductor.config")
    compilation: Any = import_module("torch._inductor.async_compile").AsyncCompile
    functorch: Any = import_module("torch._functorch.config")
    yield functorch.patch(enable_autograd_cache=False)
    yield inductor.patch(fx_graph_cache=False, compile_threads=1, cpp_wrapper=False)
    yield _replaced(compilation, "cpp_pybinding", _skipped_kernel)
    guards: Any = import_module("torch._C._dynamo.guards")
    yield _replaced(guards, "_empty_strided_cpu", _allocated)
    yield _replaced(guards, "_reinterpret_tensor", _reinterpreted)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _forget_compiled() -> None:
    """Forget what was compiled, so that nothing runs it on tensors with values."""
    import_module("torch._dynamo").reset()
    import_module("torch._inductor.codecache").PyCodeCache.cache_clear()


def _skipped_kernel(compilation: Any, argtypes: Any, source: str) -> Callable[..., None]:
    def kernel(*args: Any) -> None:
        """Write nothing: tensors without memory have no values."""

    return kernel


def _allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpreted(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)
