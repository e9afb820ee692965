"""Samples that each rank reads, from map-style datasets, streams and DataLoaders."""
