"""Predictions made without running: memory for out-of-memory advice, order and bubble of a pipeline."""
