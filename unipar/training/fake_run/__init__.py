"""A step of the user's task on tensors without memory: what it allocates, and when, for `unipar plan`."""
