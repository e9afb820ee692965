"""Data of a page, read from a result folder."""
