"""Storage of checkpoints: the operations on a disk that writing one needs, and folders at addresses, through fsspec."""
