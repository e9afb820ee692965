"""Training of one rank from set-up to end: loop, evaluation, stopping, out-of-memory errors."""
