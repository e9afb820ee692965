"""Sources of memory events: they see blocks come and go."""
