"""Checkpoint folders on disk, without torch: format, writing, publishing, verifying, retention."""
