"""Tools of this repository: the shape of its code, and the route of a config through it."""
