"""Measured memory of one rank: bytes by phase of a step and by category."""
