"""Preparation of the model for an engine: creation, blocks, transforms, pre-trained weights, optimizer groups."""
