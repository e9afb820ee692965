"""Sections, tables and columns of pages on memory: measured, and as it was predicted."""
