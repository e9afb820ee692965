"""The model before an engine takes it: creation, blocks, transforms, pre-trained weights, optimizer groups. Is handed what the task returned; does not import `task`."""
