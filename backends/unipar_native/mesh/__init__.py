"""Mesh engine: blocks over stages, sequences over ranks, matrices over ranks, and FSDP2 over the rest."""
