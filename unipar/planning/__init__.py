"""Predicting memory and communication without running: today the estimate behind out-of-memory advice."""
