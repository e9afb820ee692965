"""Export of a checkpoint's weights to files of other libraries."""
