"""Samples that each rank reads, and their order: map-style datasets, streams, DataLoaders."""
