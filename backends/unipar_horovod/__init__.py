"""Description of the backend `horovod`: ring allreduce. Its engine is in engine.py, the build in install.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

from pydantic import Field, PositiveFloat
from typing_extensions import override

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part
from unipar.backend.precision import default_dtypes
from unipar.config import Config, Section
from unipar.config.sections.strategy import AXES
from unipar.distributed.launchers import Launcher
from unipar.distributed.place import Place

if TYPE_CHECKING:
    from unipar.distributed.world import World
    from unipar.prediction.timeline import OverlapWindow, Prediction, StepTimeline


class HorovodOptions(Section):
    """Section options.horovod of the config."""

    buckets: Literal["scaled", "library"] = "scaled"
    """Size of the fusion buffer where fusion_mb is not given. scaled: room for all gradients, at most 128 MiB;
    library: always 128 MiB."""

    fusion_mb: Annotated[int, Field(ge=0)] | None = None
    """Gradients are sent together until they fill this many MiB; 0: each on its own."""

    compression: Literal["none", "fp16"] = "none"
    """fp16: gradients are rounded to half precision and sent so."""

    op: Literal["average", "adasum"] = "average"
    """Reduction of gradients (`op`). adasum needs a Horovod with MPI, and would not give the numbers of one process."""

    cycle_ms: PositiveFloat = 1.0
    """Milliseconds between two rounds in which Horovod sends the tensors that are ready (`HOROVOD_CYCLE_TIME`)."""

    process_sets: Annotated[
        tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)], ...],
        Field(strict=False),
    ] = ()
    """Additional process sets, [[0, 1], [2, 3]], for Horovod calls in your loss; gradients are reduced over all
    ranks."""


@final
class Horovod(Backend):
    """Backend of Horovod."""

    name = "horovod"
    observes = True
    exports = "horovod"
    requires = ("horovod",)
    hint = "unipar install horovod"
    launch_variables = "HOROVOD_"
    options: ClassVar[type[Section]] = HorovodOptions
    capabilities = Capabilities(
        shards=("nothing",),
        axes_lacked=dict.fromkeys(AXES, "Horovod sums tensors over ranks and has no part that splits a model"),
        gaps={
            (None, "bf16-master"): "Horovod has no bf16 tensors; use bf16-mixed, native/parameters or deepspeed/*",
        },
        launchers=(
            Launcher(
                name="horovodrun",
                order=10,
                marks=("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
                rank="HOROVOD_RANK",
                size="HOROVOD_SIZE",
                local_rank="HOROVOD_LOCAL_RANK",
                local_size="HOROVOD_LOCAL_SIZE",
                job=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
                server=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
                opens="its key-value store listens on every interface, without authentication",
            ),
        ),
        waits=("torch/distributed/", "horovod/torch/"),
        sites={"horovod/torch/compression.py:compress": "communication"},
        records="Horovod's timeline",
        recording={"HOROVOD_TIMELINE": "DYNAMIC"},
    )

    @override
    def refuse(self, config: Config) -> Iterator[str]:
        options = options_of(config)
        if options.op == "adasum":
            yield (
                "options.horovod.op: adasum needs a Horovod built with MPI; `unipar install horovod` builds it with "
                'gloo, which answers "No Adasum operation enabled"; use average'
            )
        if isinstance(config.parallel.data, int):
            yield from process_set_refusals(options, config.parallel.data)

    @override
    def launch_refusals(self, config: Config) -> Iterator[str]:
        options, theirs = options_of(config), launcher_fusion_bytes()
        if config.backend != self.name:
            return
        if theirs is not None and options.fusion_mb is not None and theirs != options.fusion_mb * 2**20:
            yield (
                f"horovodrun was told --fusion-threshold-mb {theirs / 2**20:g}, and the config says "
                f"options.horovod.fusion_mb: {options.fusion_mb}; leave one of them out"
            )
        cycle = os.environ.get("HOROVOD_CYCLE_TIME")
        if cycle is not None and options.cycle_ms != 1.0 and float(cycle) != options.cycle_ms:
            yield (
                f"horovodrun was told --cycle-time-ms {float(cycle):g}, and the config says options.horovod.cycle_ms: "
                f"{options.cycle_ms:g}; leave one of them out"
            )

    @override
    def idle_options(self, config: Config) -> Iterator[tuple[str, str]]:
        options = options_of(config)
        if options.buckets == "library" and options.fusion_mb is not None:
            yield "options.horovod.buckets", f"fusion_mb: {options.fusion_mb} says the size"

    @override
    def dtypes(self, config: Config) -> Dtypes:
        half = options_of(config).compression == "fp16"
        return default_dtypes(config.train.precision, reduction="fp16" if half else None)

    @override
    def library_name(self, config: Config) -> str:
        return "allreduce"

    @override
    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        options = options_of(config)
        return {
            "HOROVOD_FUSION_THRESHOLD": fusion_buffer_bytes(config, parameters),
            "HOROVOD_CYCLE_TIME": float(os.environ.get("HOROVOD_CYCLE_TIME", options.cycle_ms)),
            "process_sets": [list(ranks) for ranks in options.process_sets],
            "DistributedOptimizer": {"op": "Sum", "compression": options.compression},
        }

    @override
    def version(self) -> str:
        import_module("horovod.torch")  # `import horovod` alone would not load the compiled library
        return super().version()

    @override
    def install(self, *, force: bool = False) -> str:
        from unipar_horovod.install import install_horovod

        return install_horovod(force=force)

    @override
    def overlaps(self, config: Config) -> Mapping[str, OverlapWindow]:
        return {"all_reduce": "last backward"}

    @override
    def predict(self, config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
        from unipar.prediction.terms import refuse_unplanned
        from unipar.prediction.timeline import CommVolume, Prediction, Term
        from unipar.prediction.torch_engines import unwrapped_terms

        refuse_unplanned("horovod/nothing", config)
        terms = [*unwrapped_terms(config, timeline)]
        if ranks == 1:
            return Prediction(tuple(terms))
        buffer = int(fusion_buffer_bytes(config, sum(p.numel for p in timeline.parameters)))
        terms.append(Term("communication", "Horovod's fusion buffer", buffer, timeline.at("forward")))
        halved = options_of(config).compression == "fp16"
        size = sum(p.numel * (2 if halved else p.element_size) for p in timeline.parameters if p.trained)
        calls = -(-size // buffer) if buffer else sum(p.trained for p in timeline.parameters)
        return Prediction(tuple(terms), (CommVolume("data", "all_reduce", size, calls, ranks),))

    @override
    def join(self, config: Config, place: Place) -> World:
        from unipar_horovod.engine import join

        return join(config, place)

    @override
    def sends(self, world: World) -> AbstractContextManager[Mapping[str, int]]:
        from unipar_horovod.bytes_from_timeline import record_sends

        return record_sends(world)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        from unipar_horovod.engine import HorovodEngine

        return HorovodEngine(part, config, world)


def options_of(config: Config) -> HorovodOptions:
    """Return options.horovod of the config."""
    return HorovodOptions.model_validate(config.options.get("horovod", {}))


LARGEST_FUSION_BYTES = 128 * 2**20
"""Default size of Horovod's fusion buffer, in bytes."""


def launcher_fusion_bytes() -> int | None:
    """Return the size of the fusion buffer that horovodrun's --fusion-threshold-mb, or the user, has set."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    return int(text) if text.isdecimal() else None


def fusion_buffer_bytes(config: Config, parameters: int | None) -> int | str:
    """Return the bytes of the fusion buffer, or the rule in words where the number of parameters is not known yet."""
    options = options_of(config)
    if options.fusion_mb is not None:
        return options.fusion_mb * 2**20
    if (theirs := launcher_fusion_bytes()) is not None:
        return theirs
    if options.buckets == "library":
        return LARGEST_FUSION_BYTES
    if parameters is None:
        return "all gradients and up to 1 MiB more, at most 128 MiB"
    each = 8 if config.train.precision == "fp64" else 4
    return min(LARGEST_FUSION_BYTES, (parameters * each // 2**20 + 1) * 2**20)


def process_set_refusals(options: HorovodOptions, size: int) -> Iterator[str]:
    """Yield a sentence for each process set that is wrong in a world of `size` ranks."""
    known: set[tuple[int, ...]] = set()
    for ranks in options.process_sets:
        shown = list(ranks)
        if len(set(ranks)) < len(ranks):
            yield f"options.horovod.process_sets: {shown} names a rank twice"
        elif max(ranks) >= size:
            yield f"options.horovod.process_sets: {shown} names rank {max(ranks)}; this world has 0 to {size - 1}"
        elif len(ranks) == size:
            yield f"options.horovod.process_sets: {shown} are all ranks, which Horovod knows already; leave it out"
        elif tuple(sorted(ranks)) in known:
            yield f"options.horovod.process_sets: {shown} is given twice; remove one"
        known.add(tuple(sorted(ranks)))


backend = Horovod()
