"""`compare` and `scale`: the same training in several cells, whose processes take turns."""
