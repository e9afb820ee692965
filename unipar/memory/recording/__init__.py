"""Recorders of a run's memory: events become bytes by phase and category."""
