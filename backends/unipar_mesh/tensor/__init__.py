"""Tensor parallelism of one block: what is cut, and where the block's own calls need another size."""
