"""Runs on several machines: ranks that start together, run folders that are not shared, errors that reach all."""
