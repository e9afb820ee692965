"""`compare` and `scale`: the same training in several strategies, whose processes take turns."""
