"""Protocol of a checkpoint folder: writing, publishing by one rename, verifying, retention."""
