"""Predictions made without running: memory of a step, out-of-memory advice, order and bubble of a pipeline."""
