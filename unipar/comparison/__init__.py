"""`compare` and `scale`: cells that train in turns, each in its own processes."""
