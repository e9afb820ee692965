"""Worker processes: started, watched and ended together."""
