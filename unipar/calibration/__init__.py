"""Speed of this machine, measured by two ranks, for `unipar plan --machine`."""
