"""Memory of each rank: bytes by phase and by category."""
