"""Place of this process among others: launchers' variables, process group, rendezvous, GPUs counted without torch."""
