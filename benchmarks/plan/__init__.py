"""Predictions of `unipar plan` beside what is measured: `python -m benchmarks.plan --help`."""
