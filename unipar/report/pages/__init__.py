"""Pages and their sections, as HTML."""
