"""Worker processes: starting them, watching them, ending them together."""
