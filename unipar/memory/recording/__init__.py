"""Recording of memory during training, and its attribution to phases and categories."""
