"""Rank, world and launcher of this process: detection, process group, rendezvous, counting GPUs."""
