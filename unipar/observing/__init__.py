"""Observation of training scripts that nobody changed (`unipar observe`)."""
