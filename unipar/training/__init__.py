"""One rank of a run from set-up to its end: the loop, evaluation, stopping, out-of-memory errors."""
