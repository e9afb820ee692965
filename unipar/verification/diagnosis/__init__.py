"""Diagnosis: which fault explains a difference."""
