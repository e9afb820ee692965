"""Memory: what each rank holds, byte by byte, and what for."""
