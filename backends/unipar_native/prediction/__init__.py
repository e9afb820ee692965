"""Closed forms of what native holds and sends in a step, for `unipar plan`."""
