"""Long sequences cut over the ranks of a group, from a model's first block to its last."""

from unipar_mesh.context.sequence_split import SequenceSplit

__all__ = ["SequenceSplit"]
