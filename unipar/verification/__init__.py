"""`verify`: runs of every strategy compared with one process, and a diagnosis where they differ."""
