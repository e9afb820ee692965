"""Scripts that show an error by the installed library alone, each run by its file's name."""
