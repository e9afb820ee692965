"""Commands of `unipar checkpoint`, one a file."""
