"""Losses of a step: seeded and checked; across the batch, features of all samples come first."""
