"""Where checkpoints are kept besides folders of a disk: object stores and other file systems, through fsspec."""
