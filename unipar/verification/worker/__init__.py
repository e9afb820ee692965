"""The side of `verify` that runs in the ranks."""
