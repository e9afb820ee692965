"""Recording: events become bytes by phase and category."""
