"""`unipar doctor --across`: what differs between the machines of a launcher, or fails, before a run starts."""
