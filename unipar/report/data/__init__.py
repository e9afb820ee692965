"""Data of each page, read from a result folder."""
