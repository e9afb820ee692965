"""A comparison in several sizes of world, each a job of its own."""
