"""`compare` and `scale`: cells take turns, one set of processes for each."""
