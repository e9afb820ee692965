"""Meeting of the ranks of a world: addresses, store, roll call of several machines, and the watch over them."""
