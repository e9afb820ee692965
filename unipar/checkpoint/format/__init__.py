"""Format of a checkpoint folder: names, manifest, shards, strict JSON; and the file system under it."""
