"""State of a run on disk: format, protocol, save and restore."""
