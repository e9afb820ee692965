"""A stranger's backend: averages gradients by hand. It comes from outside the tree, with marks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part
from unipar.backend.precision import default_dtypes
from unipar.config import Config
from unipar.distributed.place import Place

if TYPE_CHECKING:
    from unipar.distributed.world import World


@final
class Toy(Backend):
    name = "toy"
    requires = ("toy_backend",)
    hint = "it is a test's own"
    capabilities = Capabilities(
        shards=("nothing",),
        devices=("cpu",),
        axes={"tensor": ("nothing",), "pipeline": ("nothing",), "context": ("nothing",)},
        gaps={(None, "bf16-master"): "a toy has no masters", (None, "fp16"): "a toy has no loss scaling"},
    )

    @override
    def dtypes(self, config: Config) -> Dtypes:
        return default_dtypes(config.train.precision)

    @override
    def host(self, config: Config, size: int) -> AbstractContextManager[Mapping[str, str]]:
        return nullcontext({"TOY_BACKEND": f"for {size}"})

    @override
    def join(self, config: Config, place: Place) -> World:
        from unipar.backend.joining import meet

        return meet(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        from toy_backend.engine import ByHand

        return ByHand(part, config, world)


backend: Any = Toy()
