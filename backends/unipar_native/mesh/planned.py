"""Parts of a model without values as the ranks of a mesh have them, for `unipar plan`: placed and armed as in training."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Part
from unipar.backend.prediction.rank_part import RankPart
from unipar.config import Config
from unipar.distributed.fake_groups import fake_groups
from unipar.distributed.mesh import Mesh, MeshGroups
from unipar.engines.placement import direct_parameters
from unipar_native.mesh.probe import without_frozen_models
from unipar_native.mesh.sequence.parts import join_before
from unipar_native.mesh.tensor.cuts import BlockPlan, ParameterCut
from unipar_native.mesh.tensor.vocabulary import Vocabulary, arm_vocabulary, find_vocabulary
from unipar_native.mesh.tensor_model import cuts_of_model, derive_model_plan
from unipar_native.mesh.tensor_parallel import arm_block
from unipar_native.mesh.words import refuse_empty_plans, refuse_part
from unipar_native.options import options_of


@final
class MeshPart(RankPart):
    """Part of one rank of a mesh: some of the blocks, and its cuts of their matrices."""

    def __init__(self, part: Part, config: Config, blocks: Sequence[str], cuts: ModelCuts) -> None:
        axes = config.parallel.axes
        self.model, self.blocks = part.module, blocks
        self.mesh = Mesh.of(0, axes.ranks, **axes.sizes)
        self._axes, self._cuts = axes, cuts
        self._groups: MeshGroups | None = None

    @contextmanager
    @override
    def placed(self) -> Generator[None]:
        before = [(module, direct_parameters(module)) for module in self.model.modules()]
        names = {id(p): name for name, p in self.model.named_parameters()}
        made: dict[int, nn.Parameter] = {}

        def local(p: nn.Parameter) -> nn.Parameter:
            if id(p) not in made:
                cut = self._cuts.parameters.get(names[id(p)])
                mine = p if cut is None else nn.Parameter(p.detach().new_empty(cut.local_shape()), p.requires_grad)
                made[id(p)] = mine
            return made[id(p)]

        try:
            for module, own in before:
                for name, p in own.items():
                    if p is not None:
                        setattr(module, name, local(p))
            with fake_groups(self.mesh) as self._groups:
                yield
        finally:
            for module, own in before:
                module._parameters.update(own)

    @contextmanager
    @override
    def armed(self) -> Generator[None]:
        assert self._groups is not None
        with ExitStack() as undo:
            for name in self.blocks:
                block = self.model.get_submodule(name)
                if (plan := self._cuts.plans.get(name)) is None:
                    continue
                for handle in arm_block(block, plan, self._groups.group("tensor")):
                    undo.callback(handle.remove)
                if self._axes.sequence and plan.sequence is None:
                    undo.callback(join_before(block))
            if self._cuts.vocabulary is not None:
                undo.callback(arm_vocabulary(self.model, self._cuts.vocabulary, self._groups.group("tensor")))
            yield


@final
class ModelCuts:
    """Cuts of a model's matrices over the ranks of tensor."""

    def __init__(self, part: Part, config: Config, blocks: Sequence[str]) -> None:
        assert part.loss is not None
        assert part.sample is not None
        axes = config.parallel.axes
        self.plans: Mapping[str, BlockPlan] = {}
        self.vocabulary: Vocabulary | None = None
        if axes.tensor > 1:
            self.plans = derive_model_plan(
                part.module, blocks, part.loss, part.sample(), axes.tensor, part.tensor, sequence=axes.sequence
            ).blocks
            refuse_empty_plans(axes.tensor, self.plans.values(), part.blocks)
            if options_of(config).vocabulary == "split":
                self.vocabulary = find_vocabulary(part.module, part.blocks, axes.tensor)
        self.parameters: Mapping[str, ParameterCut] = cuts_of_model(
            part.module, self.plans, self.vocabulary, axes.tensor
        )


def split_model(part: Part, config: Config) -> list[RankPart]:
    """Return the parts of a model that ranks of a mesh have; those of ranks that are alike once."""
    refuse_part(part, config)
    blocks = without_frozen_models(part.module, part.blocks)
    cuts = ModelCuts(part, config, blocks)
    return [MeshPart(part, config, blocks, cuts)]
