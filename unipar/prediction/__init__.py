"""Prediction of a step before anything runs: what a backend holds in memory, and what it sends."""
