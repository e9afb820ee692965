"""Look at the whole model before it is split, on the one rank that has it: what a mesh must know of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Any, final

import torch
from torch import Tensor, nn

from unipar.backend import Fn
from unipar.engines.fingerprint import TensorSketcher, sketch_whole_tensor
from unipar.errors import TaskError, UniparError
from unipar.utils.text import count_of
from unipar_mesh.pipeline.balance import balanced_cuts, cuts_at
from unipar_mesh.pipeline.stage import Arrival, Stage, hidden_of_output
from unipar_mesh.tensor.metas import meta_arguments
from unipar_mesh.trials_without_trace import kept_attributes, unchanged

_TIMED_RUNS = 3

_SAME_LOSS = 1e-5
"""Difference of a loss, relative to it if it is above 1, up to which the stages one after another give the same."""


@dataclass(frozen=True)
class WholeModel:
    """Loss and gradients of the whole model on the sample, with which the split one must agree."""

    loss: float
    gradients: Mapping[str, Tensor]
    """Sketch of each parameter's gradient."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that all ranks need to split it, found by running it on one microbatch."""

    blocks: Sequence[str]
    """Blocks between which a pipeline may cut, in the order in which they run."""

    tuples: Sequence[int]
    """Length of the tuple that each block returns; 0 for a tensor."""

    cuts: Sequence[int]
    """Number of the block with which each stage begins, and the number of blocks."""

    needs: Sequence[frozenset[str]]
    """Names of the parameters that each stage uses."""

    buffer_stages: Mapping[str, int]
    """Stage whose value of a buffer is the right one."""

    block_inputs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, Any])
    """Arguments that the first block of each kind got, without values."""

    def needs_of_ranks(self, ranks: int) -> list[frozenset[str]]:
        """Return the names of the parameters that each rank of the pipeline uses; stage k is on rank k mod `ranks`."""
        return [frozenset[str]().union(*self.needs[rank::ranks]) for rank in range(ranks)]


@final
class LossRun:
    """Record of one run of the loss: the order of blocks, what they get and return, how long they take."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        clock: Callable[[], float] = time.perf_counter,
        *,
        keeps_inputs: bool = True,
    ) -> None:
        """`clock`: function that returns the time, or the operations, since some moment."""
        self.order: list[str] = []
        self.inputs: dict[str, tuple[Any, Any]] = {}
        self.tuples: dict[str, int] = {}
        self.times: dict[str, float] = {}
        self.buffers: dict[str, int] = {}
        """Number of blocks that have begun when a module with buffers is first called, by the module's name."""

        self.end = 0.0
        self._begun = 0.0
        self._blocks = blocks
        self._model = model
        self._clock, self._keeps_inputs = clock, keeps_inputs

    @contextmanager
    def recorded(self) -> Generator[None]:
        handles = [
            handle
            for name in self._blocks
            for block in [self._model.get_submodule(name)]
            for handle in (
                block.register_forward_pre_hook(self._enter(name), with_kwargs=True),
                block.register_forward_hook(self._leave(name)),
            )
        ]
        for name, module in self._model.named_modules():
            if any(True for _ in module.buffers(recurse=False)):
                handles.append(module.register_forward_pre_hook(self._note(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            self.order.append(name)
            if (
                self._keeps_inputs and name not in self.inputs
            ):  # a copy: the block puts keys into a cache, which was empty when it was called
                self.inputs[name] = meta_arguments(args, kwargs, gradients=False)
            self._begun = self._clock()

        return hook

    def _leave(self, name: str) -> Any:
        def hook(block: nn.Module, args: Any, out: Any) -> None:
            self.end = self._clock()
            self.times[name] = self.times.get(name, 0.0) + self.end - self._begun
            self.tuples[name] = len(out) if isinstance(out, tuple | list) else 0

        return hook

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.buffers.setdefault(name, len(self.order))

        return hook


def look_at_model(
    model: nn.Module, blocks: Sequence[str], fn: Fn, batch: Any, stages: int, given_cuts: Sequence[str] | None = None
) -> ModelFacts:
    """Return the facts of a model that is whole, by running the task's loss on one microbatch."""
    with unchanged(model, fn):
        runs: list[tuple[LossRun, float]] = []
        for _ in range(_TIMED_RUNS if stages > 1 and given_cuts is None else 1):  # times only matter to a balance
            run = LossRun(model, blocks)
            with torch.no_grad(), run.recorded(), unchanged(model, fn):
                fn(model, batch)
            runs.append((run, time.perf_counter() - run.end))
        run = runs[0][0]
        blocks = without_frozen_models(model, blocks)
        if stages == 1:
            first = {kind_of_block(model.get_submodule(name)): name for name in reversed(blocks) if name in run.inputs}
            every = frozenset(name for name, _ in model.named_parameters())
            buffers = {name: 0 for name, _ in model.named_buffers()}
            inputs = {name: run.inputs[name] for name in first.values()}
            return ModelFacts(blocks, [0] * len(blocks), [0, len(blocks)], [every], buffers, block_inputs=inputs)
        check_block_order(run.order, blocks)
        seconds = _seconds_of_blocks(model, blocks, [run for run, _ in runs])
        numbers = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in blocks]
        rest = sum(p.numel() for p in model.parameters()) - sum(numbers)
        after = median(behind for _, behind in runs)
        balance = partial(balanced_cuts, stages, seconds, numbers, last_seconds=after, last_numbers=rest)
        cuts = balance() if given_cuts is None else cuts_at(given_cuts, blocks, stages)
        trial = CutTrial(model, blocks, [run.tuples[name] for name in blocks], fn, batch)
        needs = trial.needs_if_right(cuts) if given_cuts is None else trial.needs(cuts)[0]
        if needs is None:
            cuts = balance(places=trial.places(stages))
            needs, _ = trial.needs(cuts)
    first = {kind_of_block(model.get_submodule(name)): name for name in reversed(blocks)}
    return ModelFacts(
        blocks,
        trial.tuples,
        cuts,
        needs,
        _stages_of_buffers(model, blocks, cuts, run.buffers),
        block_inputs={name: run.inputs[name] for name in first.values()},
    )


def kind_of_block(block: nn.Module) -> tuple[Any, ...]:
    """Return what equal blocks have in common: classes, shapes, and settings that are words or switches."""
    modules = tuple(
        (
            name,
            type(m),
            tuple(sorted((k, v) for k, v in vars(m).items() if isinstance(v, str | bool) and k != "training")),
        )
        for name, m in block.named_modules()
    )
    return modules, tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())


def whole_gradients(model: nn.Module, fn: Fn, *batches: Any) -> WholeModel:
    """Return loss and gradients of the whole model, over these microbatches, in evaluation mode: nothing is drawn."""
    with unchanged(model, fn):
        model.eval()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        loss, gradients = torch.zeros(()), dict[str, Tensor]()
        for batch in batches:
            share = fn(model, batch) / len(batches)
            each: Any = torch.autograd.grad(share, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, each, strict=True):
                if gradient is not None:
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient
            loss = loss + share.detach()
            del each
    sketches = TensorSketcher(keep=False)
    known = {name: sketch_whole_tensor(sketches, name, gradients[name]) for name in named if name in gradients}
    return WholeModel(float(loss), known)


def without_frozen_models(model: nn.Module, blocks: Sequence[str]) -> Sequence[str]:
    """Return the blocks that lie beside one that trains: a frozen teacher's blocks are not the model's own."""
    trained = [name for name in blocks if any(p.requires_grad for p in model.get_submodule(name).parameters())]
    beside = {name.rpartition(".")[0] for name in trained}
    return [name for name in blocks if name.rpartition(".")[0] in beside]


def check_block_order(order: Sequence[str], blocks: Sequence[str]) -> None:
    """Raise TaskError if the loss does not run the blocks once, in order."""
    order = [name for name in order if name in blocks]
    if order == list(blocks):
        return
    both = zip([*order, "no further block"], [*blocks, "no further block"], strict=False)
    name, due = next((name, due) for name, due in both if name != due)
    raise TaskError(
        f"parallel.pipeline cuts between blocks, and the loss must run each once, in order; it ran {name!r} where "
        f"{due!r} was due: put blocks that belong together into one (model.blocks, or the task's blocks()), or leave "
        "parallel.pipeline out"
    )


def _seconds_of_blocks(model: nn.Module, blocks: Sequence[str], runs: Sequence[LossRun]) -> list[float]:
    """Return the time of each block; those of one kind take equally long."""
    each = {name: median(run.times[name] for run in runs) for name in blocks}
    kinds: dict[Any, list[str]] = {}
    for name in blocks:
        kinds.setdefault(kind_of_block(model.get_submodule(name)), []).append(name)
    means = {name: mean(each[other] for other in alike) for alike in kinds.values() for name in alike}
    return [means[name] for name in blocks]


@dataclass
class CutTrial:
    """Runs of the loss, stage after stage, on the one process that has the whole model, in evaluation mode."""

    model: nn.Module
    blocks: Sequence[str]
    tuples: Sequence[int]
    fn: Fn
    batch: Any
    _loss: float | None = None

    def needs_if_right(self, cuts: Sequence[int]) -> list[frozenset[str]] | None:
        """Return the parameters that each stage uses; None if a stage fails, or the loss is not the whole model's."""
        try:
            needs, out = self.needs(cuts)
        except UniparError:  # such as cuts within the second of two towers, whose first one is left out then
            return None
        full_loss, split = self._whole_loss(), float(out.detach().sum())
        return needs if abs(split - full_loss) <= _SAME_LOSS * max(1.0, abs(full_loss)) else None

    def needs(self, cuts: Sequence[int]) -> tuple[list[frozenset[str]], Tensor]:
        """Return the parameters that each stage uses, and the loss; no values are needed.

        A stage uses those of its blocks, and others that its output's graph reaches: no backward runs, so that this
        takes no memory for gradients and activations. A parameter outside of blocks
        that has none, such as an expert that got no sample, is in the first and last stage.
        """
        model, blocks = self.model, self.blocks
        model.eval()
        for p in model.parameters():
            p.requires_grad_(p.is_floating_point())
        owner = {
            id(p): stage
            for stage, (first, end) in enumerate(pairwise(cuts))
            for name in blocks[first:end]
            for p in model.get_submodule(name).parameters()
        }
        named = dict(model.named_parameters())
        floating = {name: p for name, p in named.items() if p.requires_grad}
        needed: list[set[str]] = [{n for n, p in named.items() if owner.get(id(p)) == s} for s in range(len(cuts) - 1)]
        out = torch.empty(())
        for number, (first, end) in enumerate(pairwise(cuts)):
            arrived = None if number == 0 else out.detach().requires_grad_(out.is_floating_point())
            with torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda _: _no_backward()):  # no activations
                out = self._stage_output(first, end, arrived)
            reached = _leaves_of_graph(out)
            needed[number] |= {name for name, p in floating.items() if id(p) in reached}
        unused = set(named) - set().union(*needed)
        needed[0] |= unused
        needed[-1] |= unused
        return [frozenset(names) for names in needed], out

    def places(self, stages: int) -> list[int]:
        """Return the numbers of the blocks with which a stage may begin; raise TaskError if they are too few."""
        end = len(self.blocks)
        allowed = [place for place in range(1, end) if self.needs_if_right([0, place, end]) is not None]
        if len(allowed) >= stages - 1:
            return allowed
        names = f" (before {', '.join(self.blocks[place] for place in allowed)})" if allowed else ""
        raise TaskError(
            f"parallel.pipeline: {count_of(stages, 'stage')} need {count_of(stages - 1, 'cut')} between blocks, and "
            f"this model allows {len(allowed)}{names}: elsewhere what blocks before the cut compute also reaches those "
            "behind it in other ways than the hidden states (a skip, an encoder's output, state kept on modules). "
            "Lower pipeline, put blocks that belong together into one (model.blocks, or the task's blocks()), or leave "
            "parallel.pipeline out"
        )

    def _whole_loss(self) -> float:
        if self._loss is None:
            with torch.no_grad(), kept_attributes([getattr(self.fn, "__self__", None)]):
                self._loss = float(self.fn(self.model, self.batch))
        return self._loss

    def _stage_output(self, first: int, end: int, arrived: Tensor | None) -> Tensor:
        stage = Stage(self.model, self.blocks, first, end, self.tuples)
        if arrived is not None:
            arrival = Arrival(arrived, None)
            stage.inlet = lambda: arrival
        try:
            with kept_attributes([getattr(self.fn, "__self__", None)]):
                return hidden_of_output(stage.enter().run(self.fn, self.model, self.batch))
        except UniparError:
            raise
        except Exception as e:
            raise TaskError(
                f"parallel.pipeline runs the loss with only some of the blocks on each stage, and it fails with "
                f"{', '.join(self.blocks[first:end])} alone ({type(e).__name__}: {e}): let it use the blocks' outputs "
                "by calling the model, or leave parallel.pipeline out"
            ) from e
        finally:
            stage.leave()


def _leaves_of_graph(out: Tensor) -> set[int]:
    """Return the ids of the tensors from which autograd knows `out` to be computed."""
    leaves: set[int] = set()
    todo: list[Any] = [out.grad_fn]
    visited: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        todo += [following for following, _ in node.next_functions]
    return leaves


def _no_backward() -> Tensor:
    raise AssertionError("a stage on trial has no backward")


def _stages_of_buffers(
    model: nn.Module, blocks: Sequence[str], cuts: Sequence[int], called: Mapping[str, int]
) -> dict[str, int]:
    """Return the stage that has the right value of each buffer: its block's, else by when its module is called."""
    stages = {name: s for s, (i, j) in enumerate(pairwise(cuts)) for name in blocks[i:j]}

    def of(buffer: str) -> int:
        inside = [stage for name, stage in stages.items() if buffer.startswith(f"{name}.")]
        if inside:
            return inside[0]
        begun = called.get(buffer.rpartition(".")[0], 0)
        return len(cuts) - 2 if begun == len(blocks) else 0

    return {name: of(name) for name, _ in model.named_buffers()}


def names_in_several(needs: Sequence[frozenset[str]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each parameter that several stages use, with these stages."""
    for name in sorted(frozenset().union(*needs)):
        stages = tuple(stage for stage, names in enumerate(needs) if name in names)
        if len(stages) > 1:
            yield name, stages
