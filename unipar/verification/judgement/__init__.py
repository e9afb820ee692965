"""Judgement: whether a cell's run is close enough to the run of one process."""
