"""`batch.micro: auto`: the largest microbatch that fits, found by trial before a run starts."""
