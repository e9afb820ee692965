"""Predictions made without running: the memory estimate behind out-of-memory advice."""
