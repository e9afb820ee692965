"""`unipar submit` and `unipar jobs`."""
