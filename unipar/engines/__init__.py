"""The toolbox from which backends build engines: base class, forward wrapper, parameter placement, clipping, loss scale, state."""
