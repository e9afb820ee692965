"""Evaluation of a run on its validation data."""
