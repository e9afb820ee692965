"""`make gpu`: tests, verify, compare, memory and precisions on a machine with a GPU, as one table."""
