"""Proof before the first step that the split model is the whole one."""
