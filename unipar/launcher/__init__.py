"""`launch` and `join`: everything that is checked before a start, starting processes, watching them, saying why they failed."""
