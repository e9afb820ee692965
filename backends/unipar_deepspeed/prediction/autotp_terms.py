"""AutoTP beside ZeRO: norms that ranks of `tensor` add up, and the proof before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unipar_mesh.prediction.predict_mesh import built_split

from unipar.config import Config
from unipar.distributed.mesh import Mesh
from unipar.memory.recording.bytes_sent_recorder import axis_of_ranks
from unipar.prediction.terms import norm_terms, whole_tensors
from unipar.prediction.timeline import CommVolume, Prediction
from unipar_deepspeed.prediction.zero_model import NORM_BYTES, ZeroModel, sub_groups


def beside_tensor(prediction: Prediction, model: ZeroModel, config: Config, stage: int, ranks: int) -> Prediction:
    """Return what ZeRO holds and sends over the data, with what comes to it as the model's matrices are cut."""
    built = tuple(built_split(model.timeline, "whole")) if model.staged else ()
    terms = () if stage or model.norm_in_fp64 else norm_terms(model.timeline, whole_tensors(model.parameters))
    sent = tuple(_norms(model, config, stage, ranks))
    return replace(prediction, terms=(*prediction.terms, *terms), sent=(*prediction.sent, *sent), built=built)


def _norms(model: ZeroModel, config: Config, stage: int, ranks: int) -> Iterator[CommVolume]:
    axes = config.parallel.axes
    if stage == 0 or model.norm_in_fp64:
        axis = axis_of_ranks(Mesh.of(0, ranks, **axes.sizes), list(range(ranks))) or ""
        yield CommVolume(axis, "all_reduce", NORM_BYTES, 1, ranks)
    if stage:
        calls = len(model.groups) if stage < 3 else len(list(sub_groups(model)))
        yield CommVolume("tensor", "all_reduce", calls * (4 if stage < 3 else NORM_BYTES), calls, axes.tensor)
