"""Toolbox for building engines: base class, forward call, parameter placement, clipping, loss scale, state."""
