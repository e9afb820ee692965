"""The model before an engine takes it: creation, blocks, transforms, weights, optimizer groups."""
