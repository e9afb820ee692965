"""Optimizers that PyTorch lacks: Muon, AdamW with narrow moments, and the base class for updates of whole matrices."""
