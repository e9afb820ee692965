"""A backend whose variants are silent errors of other libraries, each as small as it can be re-created."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override

from tests.corpus.cases import CASES
from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part, Variant
from unipar.backend.precision import default_dtypes
from unipar.config import SHARDS, Config, Section
from unipar.distributed.place import Place

if TYPE_CHECKING:
    from unipar.distributed.world import World


class CorpusOptions(Section):
    case: str = "none"
    """Name of the case; none: nothing is wrong."""


@final
class Corpus(Backend):
    name = "corpus"
    requires = ("corpus_backend",)
    options: ClassVar[type[Section]] = CorpusOptions
    capabilities = Capabilities(
        shards=SHARDS,
        variants={
            name: Variant(options={"case": name}, shards=SHARDS, says=f"with the error of {name}")
            for name in ("none", *CASES)
        },
        axes={"tensor": ("nothing",), "pipeline": ("nothing",), "context": ("nothing",)},
        devices=("cpu", "cuda"),
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
        from corpus_backend.engines import build_case

        return build_case(CorpusOptions.model_validate(config.options.get("corpus", {})).case, part, config, world)


backend: Any = Corpus()
