"""Optimizers that update a matrix as a whole, wherever its parts are: Muon, and the base class for others."""
