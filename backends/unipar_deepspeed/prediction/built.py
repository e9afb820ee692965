"""Memory of rank 0 on the CPU while DeepSpeed takes the model: the model itself, and copies of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unipar.prediction.timeline import Term
from unipar_deepspeed.prediction.swapped import parameter_buffers
from unipar_deepspeed.prediction.zero_model import MASTER_BYTES, ZeroModel, alternatives


def built_terms(model: ZeroModel, stage: int) -> Iterator[Term]:
    """Yield the terms of the fullest moment before the first step; none where a step holds all of them, too.

    In bf16-master the model is there in fp32 to the end, beside the bf16 copy that DeepSpeed trains. On other devices
    than the CPU these are in the host's memory, for the most part.
    """
    if not model.parameters_on_disk:
        yield from _converted(model, stage)
        return
    buffers = list(parameter_buffers(model))
    model_in_fp32 = Term("temporaries", "model in fp32", sum(p.numel for p in model.parameters) * MASTER_BYTES)
    copied = [replace(term, category="temporaries", name=f"{term.name}, not pinned") for term in buffers]
    yield from alternatives([[*buffers, *copied, model_in_fp32], [*buffers, *_converted(model, stage)]])


def _converted(model: ZeroModel, stage: int) -> Iterator[Term]:
    """Yield the terms of the moment at which DeepSpeed makes its copies of the model."""
    elements = sum(p.numel for p in model.parameters)
    low = sum(map(model.bytes_of, range(len(model.parameters))))
    full, share = elements * MASTER_BYTES, elements / model.ranks
    if not model.has_separate_masters:
        if stage in (1, 2):
            yield Term("parameters", "model", low)
            yield Term("temporaries", "flat copy of it", low)
        return
    yield Term("temporaries", "model in fp32", full)
    if stage == 0:
        yield Term("parameters", "model in bf16", low)
        yield Term("masters", "masters", full)
        states = sum(p.numel * sum(p.states) for p in model.parameters if p.trained)
        yield Term("optimizer", "states, from a first step without gradients", int(states))
        yield Term("temporaries", "its gradients in fp32, and a copy of the model in bf16", full + low)
    elif stage < 3:
        yield Term("parameters", "model in bf16", low)
        copies = max(low, round(2 * share * MASTER_BYTES))
        yield Term("temporaries", "flat copy of it, or masters as they are made", copies)
    else:
        yield Term("parameters", "partitions", round(share * model.element))
        yield Term("masters", "masters", round(share * MASTER_BYTES))
        yield Term("temporaries", "copies of the partitions", round(2 * share * model.element))
