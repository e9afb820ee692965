"""Checkpoints as people look at them: lists, contents, and what differs between two."""
