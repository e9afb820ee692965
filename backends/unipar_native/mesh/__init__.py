"""Training over a mesh of ranks: tensor, pipeline and context parallelism beside the data's."""
