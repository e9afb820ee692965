"""Expert parallelism: ranks of the data hold a part of each layer's experts, and send tokens to one another."""
