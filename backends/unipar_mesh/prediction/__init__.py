"""Memory and bytes sent of a split model, for `unipar plan`."""
