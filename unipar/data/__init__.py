"""Which samples a rank reads, and when: map-style datasets, streams, DataLoaders."""
