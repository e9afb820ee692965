"""Who this process is among others: launchers and their variables, the process group, rendezvous, GPUs counted without torch."""
