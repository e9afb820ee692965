"""`launch` and `join`: checks before a start, starting and watching processes, explaining failures."""
