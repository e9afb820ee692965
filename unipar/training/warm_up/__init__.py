"""The largest microbatches of a run, tried on a model that is thrown away before the first step."""
