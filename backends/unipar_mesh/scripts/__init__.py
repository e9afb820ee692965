"""Scripts of a mesh for PyTorch alone."""
