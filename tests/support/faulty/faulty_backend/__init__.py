"""A backend with faults to choose from, one a variant: what `unipar verify` must find and name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part, Variant
from unipar.backend.precision import default_dtypes
from unipar.config import Config, Section
from unipar.distributed.place import Place

if TYPE_CHECKING:
    from unipar.distributed.world import World

FAULTS = (
    "other-start",
    "no-averaging",
    "averaging-twice",
    "clip-per-rank",
    "clip-per-rank-unsaid",
    "clip-own-part",
    "divided-twice",
    "schedule-per-process",
    "same-samples",
    "group-left-out",
    "last-microbatch-dropped",
    "stale-gradient",
    "bf16-reduction",
    "not-reduced",
    "last-gradient-lost",
    "wrong-module",
    "dies",
    "hidden-buffer",
    "nameless",
)


MESH_FAULTS = (
    "healthy-mesh",
    "tied-not-summed",
    "norm-counts-twice",
    "same-masks",
    "world-times",
    "loss-of-each-rank",
    "stale-statistics",
    "skip-across-cut",
    "other-samples",
    "rows-not-added",
    "columns-not-added",
    "bias-of-each-rank",
    "whole-added-up",
    "other-columns",
    "copies-apart",
    "norm-not-summed",
    "bias-counted-again",
    "experts-divided",
    "experts-doubled",
    "router-apart",
    "auxiliary-loss-times",
    "tokens-dropped",
    "tokens-misplaced",
    "stale-experts",
    "experts-swapped",
)
"""Faults of ranks that share the work: of strategies with axes, as in `faulty/nothing+tied-not-summed+pipeline2`."""


RESUME_FAULTS = ("moments-forgotten",)
"""Faults of an engine that is given the state of another."""

AVERAGE_FAULTS = ("stale-averages",)
"""Faults of an engine whose weights are averaged."""

FP8_FAULTS = ("first-left-fp8", "late-left-fp8")
"""Faults of an engine whose linear layers multiply in fp8."""


class FaultyOptions(Section):
    fault: str = "none"
    """Which one."""


@final
class Faulty(Backend):
    name = "faulty"
    requires = ("faulty_backend",)
    options: ClassVar[type[Section]] = FaultyOptions
    capabilities = Capabilities(
        shards=("nothing",),
        variants={
            f: Variant(options={"fault": f}, shards=("nothing",), says=f"with the fault {f}")
            for f in FAULTS + MESH_FAULTS + RESUME_FAULTS + AVERAGE_FAULTS + FP8_FAULTS
        },
        axes={"tensor": ("nothing",), "pipeline": ("nothing",), "context": ("nothing",), "expert": ("nothing",)},
        devices=("cpu",),
    )

    @override
    def dtypes(self, config: Config) -> Dtypes:
        return default_dtypes(config.train.precision)

    @override
    def join(self, config: Config, place: Place) -> World:
        from unipar.backend.joining import meet

        return meet(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        options = FaultyOptions.model_validate(config.options.get("faulty", {}))
        if options.fault in MESH_FAULTS:
            from faulty_backend.mesh import plant

            return plant(options.fault, part, config, world)
        from faulty_backend.engine import KINDS

        return KINDS[options.fault](part, config, world)


backend: Any = Faulty()
