"""Sources of memory events: allocations and frees in this process."""
