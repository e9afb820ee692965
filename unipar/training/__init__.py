"""Training of one rank, from set-up to its end: the loop, evaluation, stopping, out-of-memory errors."""
