"""The part of `verify` that runs in the ranks."""
