"""`unipar verify`: recorded runs of every cell, one-process references, and a verdict on each cell."""
