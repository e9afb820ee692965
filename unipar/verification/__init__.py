"""`verify`: runs of every cell compared with one process, and a diagnosis where they differ."""
