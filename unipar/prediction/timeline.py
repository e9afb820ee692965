"""`StepTimeline`, `Term`, `Prediction`: a step of training as closed forms need it, and what a backend makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Protocol

Category = Literal[
    "parameters",
    "masters",
    "gradients",
    "optimizer",
    "averages",
    "communication",
    "buffers",
    "activations",
    "temporaries",
    "library",
    "runtime",
    "unattributed",
]
"""Purpose of memory. Engines name the first seven; the others follow from the allocating code and the lifetime."""

MemoryPlace = Literal["device", "host", "disk"]
"""Place of bytes: in the memory in which the model computes, or offloaded from it. On the CPU that is the host's."""

PredictedPhase = Literal["built", "forward", "backward", "update", "steady"]
"""Phases of a step, by the names of a measured account."""

MomentKind = Literal[
    "begin", "weights", "reach", "enter", "finish", "leave", "gradient", "taken", "call", "return", "arrive"
]
"""A phase begins, or the half of a backward that computes gradients of weights; a block is reached, entered when what
the library does before it is done, finished, and left when what the library does behind it is done, also in backward; a
gradient of a parameter is complete, and taken when what the library does with it is done. Any module is called and
returns, and in backward a gradient of its output arrives."""


class Moment(NamedTuple):
    """Something that happens in a step, at which a backend may allocate or free memory."""

    phase: PredictedPhase
    what: MomentKind
    block: int = -1
    """Number of the block; -1 if it is none in particular."""

    parameter: int = -1
    """Number of the parameter whose gradient is complete."""

    module: int = -1
    """Number of the module that is called or returns, or whose gradient arrives."""


@dataclass(frozen=True)
class PredictedParameter:
    """One parameter of the model; a tied one counts once."""

    name: str
    shape: tuple[int, ...]
    element_size: int
    """Bytes of an element in the model, before any backend keeps it in another dtype."""

    trained: bool
    block: int = -1
    """Number of the block in which it is; -1 if it is in none."""

    states: tuple[int | Fraction, ...] = ()
    """Bytes of the optimizer's state for an element, one number for each of its tensors."""

    tables: int = 0
    """Bytes of tables beside these tensors, which every rank has that has a part of it."""

    group: int = 0
    """Number of the optimizer's group in which it is."""

    viewed: bool = False
    """True if autograd keeps a view of it from forward to backward, as of a Linear's weight, and so its memory."""

    viewed_again: bool = False
    """True if it does so from the moment on at which a module has been computed again in backward."""

    stages: int = 1
    """Number of stages of a pipeline that have it, whose gradients are added up."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return self.numel * self.element_size


class UpdatedTensor(NamedTuple):
    """One tensor that the optimizer updates: a parameter, a part of one, or a master of several."""

    shape: tuple[int, ...]
    element_size: int
    group: int = 0
    """Number of the optimizer's group in which it is."""


class TemporariesOfUpdate(Protocol):
    """Function that tells what an optimizer needs beside its states."""

    def __call__(self, tensors: Sequence[UpdatedTensor], *, split: bool = False) -> int:
        """Return the bytes that one update of all these tensors needs for a moment.

        `split`: they are parts of parameters that are split over ranks, as in FSDP2.
        """
        ...


class TurnOfStep(NamedTuple):
    """State of a step in which a stage of a pipeline takes up a microbatch."""

    phase: PredictedPhase
    in_flight: int
    """Other microbatches whose forward has ended, and whose backward has not begun."""

    ended: int
    """Microbatches whose backward has ended."""

    after: Literal["", "forward", "backward"] = ""
    """Turn before; empty: there is none."""

    told: bool = False
    """True if the library is told in which order backward comes to the blocks."""


@dataclass(frozen=True)
class PredictedModule:
    """One module of the model, which may hold parameters of its own."""

    name: str
    parameters: tuple[int, ...] = ()
    """Numbers of its own parameters, without those of modules in it."""

    passes_gradient: bool = True
    """True if a gradient of its input is computed in backward."""


@dataclass(frozen=True)
class StepTimeline:
    """One microbatch's forward and backward, and the update, of a model that no library has split.

    It is the last microbatch of a step.
    """

    parameters: tuple[PredictedParameter, ...]
    buffers: Mapping[str, int]
    """Bytes of each buffer of the model."""

    blocks: tuple[str, ...]
    moments: tuple[Moment, ...]
    microbatches: int = 1
    """Number of microbatches of the step on one rank."""

    modules: tuple[PredictedModule, ...] = ()

    whole: tuple[PredictedParameter, ...] = ()
    """Parameters of the whole model, of which this is a part; empty if it is none."""

    temporaries_of_update: TemporariesOfUpdate | None = field(default=None, compare=False)
    """None: the optimizer has no tensors beside its states."""

    averages: bool = False
    """True if trained weights are averaged (`train.ema`)."""

    experts: frozenset[int] = frozenset()
    """Numbers of the blocks that are layers of experts, of which ranks of the data have different ones."""

    turn: TurnOfStep | None = None
    """Number of the microbatch, in a pipeline; None: the last, and all of the others have ended."""

    @property
    def accumulates(self) -> bool:
        """True if other microbatches ended before it in the step."""
        return self.microbatches > 1 if self.turn is None else self.turn.ended > 0

    @property
    def follows(self) -> bool:
        """True if other microbatches began before it in the step."""
        return self.microbatches > 1 if self.turn is None else self.turn.ended + self.turn.in_flight > 0

    @property
    def is_last(self) -> bool:
        """True if no microbatch follows whose gradients are added."""
        return self.turn is None or self.turn.ended == self.microbatches - 1

    def at(self, phase: PredictedPhase, what: MomentKind = "begin", block: int = -1) -> int:
        """Return the position of such a moment; where it does not happen, of the phase's begin, in backward of its end.

        In backward it does not happen to a block whose input takes no gradient: libraries end it when all is over.
        """
        instead = self._places[phase, "finish" if phase == "backward" and what != "begin" else "begin", -1]
        return self._places.get((phase, what, block), instead)

    def happens(self, phase: PredictedPhase, what: MomentKind, block: int) -> bool:
        """Return whether there is such a moment of a block."""
        return (phase, what, block) in self._places

    def gradient_at(self, parameter: int) -> int:
        """Return the position at which a parameter's gradient is complete; the update, if it gets none before."""
        return self._gradients.get(parameter, self.at("update"))

    def has_gradient(self, parameter: int) -> bool:
        """Return whether the loss uses a parameter."""
        return parameter in self._gradients

    @property
    def gradient_order(self) -> tuple[int, ...]:
        """Numbers of the parameters that get a gradient, in the order in which they do."""
        return tuple(self._gradients)

    @cached_property
    def _places(self) -> Mapping[tuple[str, str, int], int]:
        places: dict[tuple[str, str, int], int] = {}
        for i, moment in enumerate(self.moments):
            places.setdefault(moment[:3], i)
        return places

    @cached_property
    def _gradients(self) -> Mapping[int, int]:
        return {m.parameter: i for i, m in enumerate(self.moments) if m.what == "gradient"}


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that a backend holds from one moment of the step to another."""

    category: Category
    name: str
    size: int
    first: int = 0
    """Position of the moment at which it is allocated."""

    until: int | None = None
    """Position of the moment at which it is freed; None: it stays."""

    place: MemoryPlace = "device"
    """Place of its bytes."""

    def is_there(self, position: int) -> bool:
        """Return whether its bytes are held between a moment and the next."""
        return self.first <= position and (self.until is None or self.until > position)


@dataclass(frozen=True, slots=True)
class CommVolume:
    """Bytes that one rank sends or gets in a step by one collective along one axis, as `compare` counts them."""

    axis: str
    """Axis of the mesh, by its name in an account."""

    collective: str
    size: int
    """Bytes of a step: the larger of what a call is given and what it returns, summed over calls."""

    calls: int
    ranks: int
    """Number of ranks of the group."""

    stride: int = 1
    """Distance between two neighbours of the group among the ranks along the axis."""

    across: int = 0
    """Bytes in groups that have ranks on several machines: all of `size`, or none."""


OverlapWindow = Literal["last backward", "backward", "step"]
"""Part of a step during which a library sends: backward of its last microbatch, of all, or forward and backward."""


@dataclass(frozen=True)
class Prediction:
    """Memory that one rank of a backend holds in a step, and bytes that it sends, beside the model's activations."""

    terms: tuple[Term, ...]
    sent: tuple[CommVolume, ...] = ()
    built: tuple[Term, ...] = ()
    """Tensors of rank 0 at the fullest moment before the first step, where that may be more than a step needs."""

    def at(self, place: MemoryPlace) -> tuple[Term, ...]:
        """Return the terms of what lies in a place."""
        return tuple(term for term in self.terms if term.place == place)
