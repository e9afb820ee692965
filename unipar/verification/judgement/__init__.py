"""Judgement: whether a strategy's run is close enough to the run of one process."""
