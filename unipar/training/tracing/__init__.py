"""Trace of some steps of a run by torch.profiler (`log.trace`)."""
