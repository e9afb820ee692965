"""`launch` and `join`: checks before a start, starting processes, watching them, explaining their failures."""
