"""Toolbox for building engines: base class, forward wrapper, placement of parameters, clipping, loss scale, state."""
