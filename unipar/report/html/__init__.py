"""HTML elements of every page, and their style."""
