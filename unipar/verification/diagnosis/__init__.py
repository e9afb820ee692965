"""Diagnosis: the kind of fault that explains a difference, and where the difference begins."""
