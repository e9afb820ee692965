"""Estimates of memory without a run: today those for the advice in out-of-memory errors."""
