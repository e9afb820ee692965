"""Worker processes: started, watched, ended together."""
