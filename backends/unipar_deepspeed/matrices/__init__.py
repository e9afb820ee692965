"""Matrices that an optimizer updates whole, though ZeRO keeps ranges of them in flat tensors."""
