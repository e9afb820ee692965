"""Import of checkpoints of other libraries; what is pickled is read in a process of its own."""
