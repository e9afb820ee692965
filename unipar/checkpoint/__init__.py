"""State that outlives a run: how it is saved and read back; `format/` and `protocol/` do without torch."""
