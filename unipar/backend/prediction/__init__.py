"""What a backend predicts of a step before anything runs: its memory, and the bytes that it sends."""
