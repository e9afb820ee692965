"""Preparation of a run: everything that can be checked before a process starts."""
